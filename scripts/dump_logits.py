#!/usr/bin/env python3
"""Write the logits of a model over given token ids: what the engine computes, position by position.

    scripts/dump_logits.py --model gemma.gguf --token-ids-file ids.json --out logits.npz
    scripts/dump_logits.py --model gemma.gguf --token-ids-file ids.json --out l.npz --positions 0,-1

The ids are a JSON list, taken verbatim.  Prefill runs on the engine's grid.  The archive, not
compressed, holds ``logits`` float32 (positions, vocabulary), in natural units and after soft
capping, and ``positions`` int64; row i predicts the token at ``positions[i] + 1``.  It appears
whole or not at all, and is written chunk by chunk: memory does not grow with the prompt.

Exits 0 when done, 1 if the model, the ids or the file make it impossible, 2 on a bad argument.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from millpond.runtime.cli_prompt import read_token_ids
from millpond.runtime.config import CHUNK_TOKENS_CPU, RuntimeConfig
from millpond.runtime.errors import ConfigError, InvalidParameter, MillpondError
from millpond.runtime.testing.direct import check_ids, chunks, load_direct

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        dump(options)
    except ConfigError as error:
        print(f"dump_logits: {error}", file=sys.stderr)
        return USAGE
    except MillpondError as error:
        print(f"dump_logits: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"dump_logits: {options.out}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def dump(options: argparse.Namespace) -> None:
    """Read the ids, load the model, write the archive.  Raises MillpondError or OSError."""
    out = Path(options.out).expanduser().resolve()
    if out.exists() and not out.is_file():
        # renaming over a device or a pipe would take it away from everybody
        raise InvalidParameter(f"{options.out}: found no regular file, expected one or nothing")
    ids = read_token_ids(options.token_ids_file)
    positions = wanted_positions(options.positions, len(ids))
    config = RuntimeConfig(
        model=options.model,
        spill=False,
        kv_dtype=options.kv_dtype,
        compute_dtype=options.compute_dtype,
        weight_form=options.weight_form,
        prefill_chunk_tokens=options.chunk_tokens,
        block_tokens=options.chunk_tokens,  # no block is cut: only the grid matters
        sliding_boundary_tokens=0,
    )
    identity, layout, model = load_direct(options.model, config)
    check_ids(ids, identity)
    temp = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temp, "x") as archive:
            with archive.open("positions.npy", "w") as member:
                np.lib.format.write_array(member, np.array(positions, np.int64))
            with archive.open("logits.npy", "w", force_zip64=True) as member:
                _write_head(member, (len(positions), identity.config.vocab))
                reading = model.reading()
                for chunk in chunks(len(ids), layout.chunk_tokens):
                    rows = [position - chunk.start for position in positions if position in chunk]
                    logits = reading.prefill(ids[chunk.start : chunk.stop], rows)
                    member.write(np.ascontiguousarray(logits, "<f4").data.cast("B"))
        temp.replace(out)
    finally:
        temp.unlink(missing_ok=True)


def wanted_positions(text: str | None, tokens: int) -> list[int]:
    """Return ascending positions from ``0,5,-1``, negative ones from the end; None: every one.

    Raises InvalidParameter for one outside the prompt, or named twice.
    """
    if text is None:
        return list(range(tokens))
    found = [_position(part, tokens) for part in text.split(",")]
    if len(set(found)) != len(found):
        raise InvalidParameter(f"positions: found one twice in {text!r}, expected each once")
    return sorted(found)


def _position(text: str, tokens: int) -> int:
    try:
        given = int(text)
    except ValueError:
        raise ConfigError(f"positions: found {text!r}, expected numbers as in 0,5,-1") from None
    if not -tokens <= given < tokens:
        raise InvalidParameter(f"positions: found {given}, expected {-tokens} to {tokens - 1}")
    return given % tokens


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1 on")
    return int(text)


def _write_head(member: IO[bytes], shape: tuple[int, int]) -> None:
    head: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(member, head)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--token-ids-file", required=True, metavar="FILE", help="JSON list of ids")
    parser.add_argument("--out", required=True, metavar="FILE", help="the archive to write")
    parser.add_argument("--positions", metavar="LIST", help="as in 0,5,-1; else every position")
    parser.add_argument("--chunk-tokens", type=_positive, default=CHUNK_TOKENS_CPU)
    parser.add_argument("--kv-dtype", choices=("f32", "f16", "bf16"))
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--weight-form", choices=("dense", "repacked"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
