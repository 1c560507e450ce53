#!/usr/bin/env python3
"""Measure the engine beside mlx-lm or llama.cpp: same weights, prompts and device.  One JSON line.

    scripts/bench_engine.py                                   CPU, mlx-lm, the demo model
    scripts/bench_engine.py --peer llama-cpp
    scripts/bench_engine.py --device gpu --model 4b.gguf --lengths 512,4096,32768

Each side is a process of its own that holds the model; the other one waits while a figure is taken,
and they take turns, so that a busy moment of the machine meets both.  Figures are medians of
``--repeats`` rounds; ``spread`` is (largest - smallest) / median; ratios are ours to the peer's.

prefill   tokens of the prompt / time to the first token, no cache, a new prompt each time
decode    tokens a second after the first one, greedy
batch     the same of 8 requests at once, all tokens counted
warm      time to the first token of a prompt of k · C + 1 tokens whose blocks are on disk (page
          cache warm), against a decode step and against the prefill of the same prompt
spilling  decode, and prefill of the longest prompt, with spilling on against off, blocks being
          written

mlx-lm gets the weights as millpond holds them and the same BLAS with as many threads; llama.cpp
reads the file itself.  Peers are no dependencies: ``pip install 'millpond[bench]'`` brings them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIDES = Path(__file__).with_name("bench_sides.py")
MODULES = {"mlx-lm": "mlx_lm", "llama-cpp": "llama_cpp", "none": "json"}
ROOT = Path(__file__).resolve().parents[1]


class Side:
    """A process that holds a model and answers one question after the other."""

    def __init__(self, name: str, options: argparse.Namespace, more: Mapping[str, Any]) -> None:
        asked = {"side": name, "model": options.model, "threads": options.threads} | dict(more)
        asked |= {"device": options.device, "weights": options.weights}
        environment = os.environ | {"OPENBLAS_NUM_THREADS": str(options.threads)}
        self._process = subprocess.Popen(
            [sys.executable, str(SIDES), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def about(self) -> dict[str, Any]:
        """Return what it says once its model is loaded."""
        return self._answer()

    def ask(self, what: str, **numbers: int) -> float:
        """Return the figure asked for."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what} | numbers) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["value"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> int:
    """Run the rounds and print the line."""
    options = _options()
    if importlib.util.find_spec(MODULES[options.peer]) is None:
        raise SystemExit(
            f"{options.peer} is not installed: pip install 'millpond[bench]', or --peer none"
        )
    root = tempfile.mkdtemp(prefix="millpond-bench-")
    sides: dict[str, Side] = {}
    try:
        sides["ours"] = Side("ours", options, {})
        sides["spilling"] = Side("ours", options, {"root": root})
        if options.peer != "none":
            sides["peer"] = Side(options.peer, options, {})
        about = {name: side.about() for name, side in sides.items()}
        found = _rounds(sides, options)
    finally:
        for side in sides.values():
            side.close()
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(_line(found, about, options)))
    return 0


Found = dict[tuple[str, str], list[float]]


def _rounds(sides: Mapping[str, Side], options: argparse.Namespace) -> Found:
    """Ask every side the same in turn; a first round, which warms up, is not counted."""
    found: Found = {}
    for number in range(options.repeats + 1):
        for what, asked, numbers in _questions(options):
            for name in asked:
                if name in sides:
                    seed = 1000 * number + numbers["n"]
                    value = sides[name].ask(what.split()[0], seed=seed, **numbers)
                    found.setdefault((what, name), []).append(value)
                    print(f"{number} {what} {name} {value:.2f}", file=sys.stderr, flush=True)
    return {key: values[1:] for key, values in found.items()}


Question = tuple[str, tuple[str, ...], dict[str, int]]


def _questions(options: argparse.Namespace) -> list[Question]:
    both = ("ours", "peer")
    shortest, longest = options.lengths[0], options.lengths[-1]
    found: list[Question] = [
        (f"prefill {length}", both, {"n": length}) for length in options.lengths
    ]
    decode = {"n": shortest, "k": options.tokens}
    found.append((f"decode {shortest}", both, decode))
    if longest != shortest:
        found.append((f"decode {longest}", both, {"n": longest, "k": options.tokens}))
    found.append(("batch 8", both, {"n": min(512, shortest), "k": options.tokens}))
    found += [(f"warm {length}", ("spilling",), {"n": length}) for length in options.lengths]
    middle = options.lengths[len(options.lengths) // 2]
    numbers = {"n": middle, "k": options.tokens}
    found.append((f"decode {middle} spilling", ("ours", "spilling"), numbers))
    return [*found, (f"prefill {longest} spilling", ("spilling",), {"n": longest})]


def _line(found: Found, about: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    medians = {key: statistics.median(values) for key, values in found.items()}
    figures: dict[str, Any] = {}
    for (what, name), values in found.items():
        spread = (max(values) - min(values)) / medians[what, name]
        figures.setdefault(what, {})[name] = round(medians[what, name], 2)
        figures[what][f"spread_{name}"] = round(spread, 3)
    ratios = {
        what: round(medians[what, "ours"] / medians[what, "peer"], 2)
        for what, name in found
        if name == "peer"
    }
    spilling = f"decode {options.lengths[len(options.lengths) // 2]} spilling"
    ratios["spilling on / off"] = round(
        medians[spilling, "spilling"] / medians[spilling, "ours"], 3
    )
    longest = f"prefill {options.lengths[-1]}"
    ratios["prefill spilling on / off"] = round(
        medians[f"{longest} spilling", "spilling"] / medians[longest, "ours"], 3
    )
    step_ms = 1e3 / medians[f"decode {options.lengths[0]}", "ours"]
    for length in options.lengths:
        warm = medians[f"warm {length}", "spilling"]
        cold = 1e3 * length / medians[f"prefill {length}", "ours"]
        ratios[f"warm {length} / decode step"] = round(warm / step_ms, 2)
        ratios[f"prefill {length} / warm"] = round(cold / warm, 2)
    batch, one = medians["batch 8", "ours"], medians[f"decode {options.lengths[0]}", "ours"]
    ratios["batch 8 / one"] = round(batch / one, 2)
    return {
        "bench": "engine",
        "units": {"prefill, decode, batch": "tokens/s", "warm": "ms"},
        "device": options.device,
        "model": Path(options.model).name,
        "peer": options.peer,
        "blas_threads": options.threads,
        "repeats": options.repeats,
        "figures": figures,
        "ratios": ratios,
        "sides": about,
        "load": [round(value, 2) for value in os.getloadavg()],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--peer", choices=sorted(MODULES), default="mlx-lm")
    parser.add_argument("--model", default=str(ROOT / "models" / "gemma3-270m.gguf"))
    parser.add_argument("--weights", choices=("dense", "repacked"), default="dense")
    parser.add_argument("--lengths", type=_lengths, default=[256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the BLAS")
    options = parser.parse_args()
    if not Path(options.model).exists():
        raise SystemExit(f"{options.model}: found no file (scripts/quickstart fetches the demo)")
    return options


def _lengths(text: str) -> Sequence[int]:
    return sorted(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
