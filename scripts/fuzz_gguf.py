#!/usr/bin/env python3
"""Feed damaged GGUF headers to all that reads one; only typed errors may come out.

Each run damages the header of a real or synthetic file (cuts, flipped bits, huge lengths, splices,
repetitions) and takes it through the parser, the configuration, the tensor check and the
vocabulary.  A run fails if it raises anything but millpond's own errors, uses more than two seconds
of CPU, or needs more memory than twice the file and 100 MB.

    scripts/fuzz_gguf.py --runs 100000 --seed 1
Prints one summary line; exits 0 if every run passed, 1 if one failed (its number is printed;
``--only NUMBER`` repeats it alone), 2 on a bad argument.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from millpond.codecs.errors import MillpondError
from millpond.codecs.gguf import parse_header
from millpond.runtime.families.config_gguf import model_config
from millpond.runtime.families.tensors import check_tensors
from millpond.runtime.testing.gguf_writer import gguf_bytes
from millpond.runtime.vocabulary import read_vocabulary

RUN_S_MAX = 2.0
_RSS_UNITS = 2**20 if sys.platform == "darwin" else 2**10  # per MiB: macOS counts bytes
SPARE_BYTES = 100 * 10**6
HEADER_BYTES_MAX = 64 * 1024  # larger fixtures are left out: a hundred thousand runs take minutes
HUGE = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1)
FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "reference" / "fixtures"


@dataclass(frozen=True)
class Base:
    """A valid header, the length of its whole file, and where its parts lie.

    lengths  positions of lengths and counts, 8 bytes each
    numbers  positions of the numbers that describe the model, 4 bytes each
    """

    header: bytes
    file_bytes: int
    lengths: tuple[int, ...]
    numbers: tuple[int, ...]


class Overrun(Exception):
    """A run used more CPU time than it may."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat one run and show its traceback")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES)
    chosen = parser.parse_args(arguments)
    bases = load_bases(chosen.fixtures)
    limit_memory(2 * max(len(base.header) for base in bases) + SPARE_BYTES)
    signal.signal(signal.SIGPROF, _overrun)
    numbers = range(chosen.runs) if chosen.only is None else (chosen.only,)
    outcomes, slowest_s = Counter[str](), 0.0
    started = time.monotonic()
    for number in numbers:
        outcome, seconds = run_one(bases, chosen.seed, number)
        outcomes[outcome] += 1
        slowest_s = max(slowest_s, seconds)
        if outcome not in ALLOWED:
            print(f"run {number}: {outcome}", file=sys.stderr)
    failed = sum(count for outcome, count in outcomes.items() if outcome not in ALLOWED)
    summary = {
        "runs": len(numbers),
        "seed": chosen.seed,
        "bases": len(bases),
        "outcomes": dict(outcomes.most_common()),
        "slowest_ms": round(1e3 * slowest_s, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _RSS_UNITS),
        "seconds": round(time.monotonic() - started, 1),
        "failed": failed,
    }
    print(json.dumps(summary))
    return 1 if failed else 0


ALLOWED = ("read", "GgufError", "ModelUnreadable", "UnsupportedModel", "TokenizerError")


def run_one(bases: Sequence[Base], seed: int, number: int) -> tuple[str, float]:
    """Damage one header and read it; return the outcome and the CPU seconds it took."""
    source = random.Random(f"{seed}:{number}")
    base = source.choice(bases)
    data = damaged(base, bases, source)
    # Half of the files end where the header does, the others are long enough for their tensors.
    file_bytes = len(data) if source.random() < 0.5 else max(len(data), base.file_bytes)
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, RUN_S_MAX)
    try:
        read(data, file_bytes)
        outcome = "read"
    except MillpondError as error:
        outcome = type(error).__name__
    except BaseException as error:  # whatever else it is, it is what this script looks for
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return outcome, time.process_time() - started


def read(data: bytes, file_bytes: int) -> None:
    """Do what opening and identifying a file does, short of reading tensor bytes."""
    header = parse_header(data, file_bytes)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    config = model_config(header.metadata, shapes)
    check_tensors(config, shapes)
    read_vocabulary(header.metadata, config.vocab)


def damaged(base: Base, bases: Sequence[Base], source: random.Random) -> bytes:
    """Return the header with one to four faults."""
    data = bytearray(base.header)
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        source.choice(FAULTS)(data, base, bases, source)
        if not data:
            break
    return bytes(data)


Fault = Callable[[bytearray, Base, Sequence[Base], random.Random], None]


def cut(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Drop the end."""
    del data[source.randrange(len(data)) :]


def flip(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Flip up to eight bits."""
    for _ in range(source.randint(1, 8)):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def huge_length(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Overwrite a length or count with an extreme number."""
    at = source.choice(base.lengths)
    data[at : at + 8] = source.choice(HUGE).to_bytes(8, "little")


def huge_anywhere(
    data: bytearray, base: Base, bases: Sequence[Base], source: random.Random
) -> None:
    """Overwrite four or eight bytes anywhere with an extreme number."""
    at, size = source.randrange(len(data)), source.choice((4, 8))
    number = source.choice(HUGE) % 2 ** (8 * size)
    data[at : at + size] = number.to_bytes(size, "little")


def other_number(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Give a model another number: the header stays valid, the configuration may not."""
    at = source.choice(base.numbers)
    number = source.choice((0, 1, 2, 3, 7, 31, 64, 513, 2**16, 2**31, 2**32 - 1, 0x7FC00000))
    data[at : at + 4] = number.to_bytes(4, "little")


def small_type(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Overwrite the type that stands before a length, or whatever is there, with a small number."""
    at = max(0, source.choice(base.lengths) - 4)
    data[at : at + 4] = source.randrange(48).to_bytes(4, "little")


def splice(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Replace a piece by a piece of another header."""
    other = source.choice(bases).header
    start, size = source.randrange(len(other)), source.choice((1, 8, 64, 1024, 16_384))
    at, gone = source.randrange(len(data)), source.choice((0, size, source.randrange(1, 64)))
    data[at : at + gone] = other[start : start + size]


def repeat(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Say a piece twice: keys, tensors."""
    start, size = source.randrange(len(data)), source.randrange(1, 512)
    data[start:start] = data[start : start + size]


def noise(data: bytearray, base: Base, bases: Sequence[Base], source: random.Random) -> None:
    """Overwrite a piece with random bytes."""
    at, size = source.randrange(len(data)), source.randrange(1, 64)
    data[at : at + size] = source.randbytes(size)


FAULTS: tuple[Fault, ...] = (
    cut,
    flip,
    huge_length,
    huge_length,
    huge_anywhere,
    other_number,
    other_number,
    small_type,
    splice,
    repeat,
    noise,
)


def load_bases(folder: Path) -> list[Base]:
    """Return headers to damage: synthetic ones, and those of the fixtures if there are any."""
    paths = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    bases = [_base(data) for data in (*synthetic(), *(path.read_bytes() for path in paths))]
    return [base for base in bases if len(base.header) <= HEADER_BYTES_MAX]


def synthetic() -> list[bytes]:
    """Return small files: few bytes, so that most faults hit structure."""
    scalars: dict[str, object] = {
        "general.alignment": 32,
        "a": True,
        "b": 1.5,
        "c": "text",
        "d": np.uint64(7),
        "e": [b"one", b"", b"\xff"],
        "f": np.arange(5, dtype=np.int32),
        "g": np.array([True, False]),
    }
    tensors = {"x": np.ones((2, 32), np.float32), "y": np.ones(8, np.float32)}
    llama: dict[str, object] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.block_count": 1,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [b"<s>", b"a"],
        "tokenizer.ggml.scores": np.zeros(2, np.float32),
    }
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    model: dict[str, np.ndarray] = {
        f"blk.0.{name}.weight": np.ones((8, 8), np.float32) for name in square
    }
    model |= {f"blk.0.{name}.weight": np.ones(8, np.float32) for name in ("attn_norm", "ffn_norm")}
    model |= {"output_norm.weight": np.ones(8, np.float32)}
    model |= {"token_embd.weight": np.ones((2, 8), np.float32)}
    return [gguf_bytes(scalars, tensors, 2), gguf_bytes(scalars, {}), gguf_bytes(llama, model)]


def _base(data: bytes) -> Base:
    header = data[: parse_header(data, len(data)).data_offset]
    lengths, numbers = {8, 16}, set()
    for match in _NAMES.finditer(header):
        at = match.start()
        lengths.add(at - 8)  # the length of the key or name itself
        after = at + int.from_bytes(header[at - 8 : at], "little")
        if after + 16 > len(header):
            continue
        kind = int.from_bytes(header[after : after + 4], "little")
        if match[1] and kind in _FOUR_BYTES:
            numbers.add(after + 4)
        else:
            lengths |= {after + 4, after + 8}  # of a string, a dimension, or an array
    return Base(header, len(data), tuple(sorted(lengths)), tuple(sorted(numbers)) or (16,))


_NAMES = re.compile(rb"(gemma3\.|gemma4\.|llama\.)|general\.|tokenizer\.|blk\.|token_embd")
_FOUR_BYTES = (4, 5, 6)  # value types u32, i32, f32


def limit_memory(spare_bytes: int) -> None:
    """Bound the address space to what is in use now and ``spare_bytes``, where the system can."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = pages * resource.getpagesize() + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        print("memory is not bounded on this system", file=sys.stderr)


def _overrun(number: int, frame: object) -> None:
    raise Overrun(f"more than {RUN_S_MAX} s of CPU time")


if __name__ == "__main__":
    sys.exit(main())
