#!/usr/bin/env python3
"""Compare our logits with those that other software recorded; stops at the first that differ.

    scripts/check_reference.py                      # all tiny fixtures, and the real model if there
    scripts/check_reference.py --kv-dtype f16       # K and V in 16 bits: a wider tolerance
    scripts/check_reference.py --real gemma.gguf    # this Gemma 3 270M
    scripts/check_reference.py gemma4-moe           # only files whose name has this in it

Each tiny sequence is run in one pass, in chunks of 7 tokens, and token by token.  The real model is
looked for in $MILLPOND_TEST_MODEL and in models/gemma3-270m.gguf.

Exits 0 if all agree, 1 at the first that does not or if something cannot be read, 2 on a bad
argument.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from millpond.runtime.blas import preload
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import MillpondError
from millpond.runtime.testing.direct import load_direct

DONE, FAILED, INTERRUPTED = 0, 1, 130
ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT.parent / "shared" / "reference" / "fixtures"
REAL_RECORD = "gemma3-270m-outputs.json"


class Differs(Exception):
    """Logits that are not those recorded, or nothing to compare."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    options = _parser().parse_args(arguments)
    preload(threads=RuntimeConfig(model="").blas_threads)  # before anything imports MLX
    try:
        check_tiny(options)
        check_real(options)
    except Differs as error:
        print(f"check_reference: {error}", file=sys.stderr)
        return FAILED
    except (MillpondError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        print(f"check_reference: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    print("all agree")
    return DONE


def check_tiny(options: argparse.Namespace) -> None:
    """Compare every fixture; raises Differs at the first that does not agree."""
    found = sorted(path for path in options.fixtures.glob("*.gguf") if options.only in path.name)
    found = [path for path in found if path.with_suffix(".npz").exists()]
    if not found and not (options.only and options.real):
        raise Differs(f"{options.fixtures}: found no .gguf beside an .npz, expected the fixtures")
    if found:
        head = ("file", "length", "mode", "max", "median", "argmax", "ok")
        print("{:<28}{:>6}  {:<15}{:>10}{:>10}{:>10}  {}".format(*head))
    for path in found:
        _check_file(path, options)


def _check_file(path: Path, options: argparse.Namespace) -> None:
    from millpond.runtime.testing import reference

    config = RuntimeConfig(model=str(path), spill=False, kv_dtype=options.kv_dtype)
    identity, _, model = load_direct(path, config)
    tolerance = reference.TOLERANCES[options.kv_dtype]
    flips = options.kv_dtype != "f32" and identity.config.experts > 0
    with np.load(path.with_suffix(".npz")) as arrays:
        for length in reference.recorded_lengths(arrays):
            for mode in reference.MODES:
                if length == 1 and mode != reference.MODES[0]:
                    continue
                one = reference.compare(model, arrays, length, mode)
                ok = one.is_near(tolerance) if flips else one.is_within(tolerance)
                print(
                    f"{path.name:<28}{length:>6}  {mode:<15}{one.max_abs:>10.2e}"
                    f"{one.median_abs:>10.2e}{one.argmax_equal:>6}/{length:<3}  "
                    f"{'yes' if ok else 'NO'}",
                    flush=True,
                )
                if not ok:
                    raise Differs(
                        f"{path.name}, {length} tokens, {mode}: found {one}, "
                        f"expected differences of at most {tolerance}"
                    )


def check_real(options: argparse.Namespace) -> None:
    """Compare the real model, if there is one; raises Differs at the first run that does not."""
    path = options.real or _real_model()
    if path is None:
        print("real model: not compared, there is none (--real FILE)")
        return
    record = json.loads((options.fixtures / REAL_RECORD).read_text(encoding="utf-8"))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != record["sha256"]:
        raise Differs(f"{path}: found SHA-256 {digest}, expected {record['sha256']}")
    from millpond.runtime.testing.reference import REAL_TOLERANCES, compare_real

    tolerance = REAL_TOLERANCES[options.kv_dtype]
    config = RuntimeConfig(model=str(path), spill=False, kv_dtype=options.kv_dtype)
    _, layout, model = load_direct(path, config)
    print(f"{'prompt':<28}{'tokens':>6}{'top 5':>10}{'probe':>10}{'greedy':>10}  ok")
    for run in record["runs"]:
        name = repr(run.get("text") or run["source"])[:26]
        one = compare_real(model, run, record["probe_ids"], layout.chunk_tokens)
        ok = one.is_within(tolerance)
        print(
            f"{name:<28}{run['n']:>6}{one.top_abs:>10.5f}{one.probe_abs:>10.5f}"
            f"{one.greedy_equal:>7}/{one.greedy_tokens}  {'yes' if ok else 'NO'}",
            flush=True,
        )
        if not ok:
            raise Differs(
                f"{name}: found {one}, expected differences of at most {tolerance}, and equal ids "
                "where the margin is clear"
            )


def _real_model() -> Path | None:
    named = os.environ.get("MILLPOND_TEST_MODEL")
    if named:
        return Path(named).expanduser()
    usual = ROOT / "models" / "gemma3-270m.gguf"
    return usual if usual.exists() else None


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="a part of the names of fixtures")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, metavar="DIR")
    parser.add_argument("--real", type=Path, metavar="FILE", help="Gemma 3 270M, Q4_K_M")
    parser.add_argument("--kv-dtype", choices=("f32", "f16", "bf16"), default="f32")
    return parser


if __name__ == "__main__":
    sys.exit(main())
