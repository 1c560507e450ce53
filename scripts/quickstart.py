"""One prompt of 2,049 tokens, twice, in two processes: what the second need not compute again.

With ``--chat`` a talk with a small model instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from environment import ROOT, SetupFailed, base_extras, chat_model, demo_model, prepare, tell

PROMPT_TOKENS, COMPLETION_TOKENS, RUNS = 2_049, 16, 2
FOLDER = ROOT / ".quickstart"
SPILL_ROOT, PROMPT = FOLDER / "spill", FOLDER / "prompt.json"


def main() -> int:
    """Run the script; return its exit code: 1 if a run failed or the tokens differ."""
    options = _options()
    try:
        python = prepare(base_extras(options.device), ROOT / _environment_name(options.device))
        if options.fresh:
            shutil.rmtree(SPILL_ROOT, ignore_errors=True)
        if options.chat:
            _chat(python, Path(options.model or chat_model(python)).absolute())
        model = Path(options.model).absolute() if options.model else demo_model(python)
        FOLDER.mkdir(exist_ok=True)
        PROMPT.write_text(json.dumps(_prompt(python, model)), encoding="utf-8")
        reports = [_generate(python, model, number) for number in range(1, RUNS + 1)]
    except SetupFailed as error:
        tell(f"quickstart: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return _show(reports)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description=(
            f"Run one prompt of {PROMPT_TOKENS:,} tokens in {RUNS} processes, one after the other. "
            "The KV blocks stay in .quickstart/spill, so a later call finds them."
        ),
    )
    parser.add_argument("--fresh", action="store_true", help="forget the KV blocks first")
    parser.add_argument(
        "--chat", action="store_true", help="talk with SmolLM2 135M Instruct instead"
    )
    parser.add_argument("--model", metavar="GGUF", help="your model instead of ours")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="build of MLX on Linux"
    )
    return parser.parse_args()


def _environment_name(device: str) -> str:
    """Two builds of MLX in one environment overwrite each other."""
    return ".venv-cuda" if device == "cuda" else ".venv"


def _prompt(python: Path, model: Path) -> list[int]:
    """Return a prompt of the right length: BOS, then the licence, over and over if need be."""
    text = (ROOT / "LICENSE").read_bytes()
    found = _millpond(python, ["tokenize", "--model", str(model), "--json"], text)
    ids: list[int] = found["token_ids"] * (PROMPT_TOKENS // max(1, len(found["token_ids"])) + 1)
    start = [] if found["bos"] is None else [found["bos"]]
    return (start + ids)[:PROMPT_TOKENS]


def _generate(python: Path, model: Path, number: int) -> dict[str, Any]:
    tell(f"run {number} of {RUNS}")
    command = ["generate", "--model", str(model), "--token-ids-file", str(PROMPT), "--json"]
    command += ["--max-tokens", str(COMPLETION_TOKENS), "--temperature", "0"]
    return _millpond(python, [*command, "--spill-root", str(SPILL_ROOT)])


def _chat(python: Path, model: Path) -> NoReturn:
    """Become ``millpond chat``."""
    command = [str(python), "-P", "-m", "millpond.runtime", "chat", "--model", str(model)]
    command += ["--spill-root", str(SPILL_ROOT)]
    os.execv(python, command)


def _millpond(python: Path, arguments: list[str], text: bytes = b"") -> dict[str, Any]:
    """Run one command of millpond with ``--json``; its complaints go to stderr."""
    command = [str(python), "-P", "-m", "millpond.runtime", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    complaints = done.stderr.decode(errors="replace").splitlines()
    for line in complaints:
        if done.returncode or line.startswith("millpond:"):
            tell(line)
    if done.returncode:
        raise SetupFailed(f"millpond {arguments[0]} failed with exit code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _show(reports: list[dict[str, Any]]) -> int:
    print(f"\n{'run':>5}{'TTFT ms':>11}{'cached tokens':>17}{'bytes restored':>18}{'tok/s':>9}")
    for number, report in enumerate(reports, 1):
        usage = report["usage"]
        cached = f"{usage['cached_tokens']:,} of {usage['prompt_tokens']:,}"
        ttft, restored = report["timings"]["ttft_ms"], report["restore"]["bytes"]
        print(f"{number:>5}{ttft:>11,.0f}{cached:>17}{restored:>18,}{_speed(report):>9.1f}")
    same = all(report["token_ids"] == reports[0]["token_ids"] for report in reports)
    print(f"\nsame tokens: {'yes' if same else 'no'}")
    first, last = reports[0], reports[-1]
    if not last["usage"]["cached_tokens"]:
        print("the last run found nothing in the cache: see the messages above")
        return 1
    if not first["usage"]["cached_tokens"]:
        share = last["timings"]["ttft_ms"] / first["timings"]["ttft_ms"]
        print(f"warm TTFT: {share:.1%} of cold")
    return 0 if same else 1


def _speed(report: dict[str, Any]) -> float:
    """Tokens a second after the first one."""
    steps, decode_ms = report["usage"]["completion_tokens"] - 1, report["timings"]["decode_ms"]
    return 1e3 * steps / decode_ms if decode_ms else 0.0


if __name__ == "__main__":
    sys.exit(main())
