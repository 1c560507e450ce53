#!/usr/bin/env python3
"""Kill a process that spills, again and again, and look at what it leaves.

    scripts/torture_store.py --kills 200 --seed 7
    scripts/torture_store.py --kills 50 --model gemma.gguf
    MILLPOND_SPILL_KEY=... scripts/torture_store.py --kills 50      # encrypted blocks

Each round starts a real process that answers prompts over one spill root, sends it SIGKILL at a
random moment, and then checks: every block that the next open accepts verifies; no temporary file
stays; the budget holds; and a prompt answered over that root has the tokens and the logits that it
has without a cache.  Prints one JSON line; exits 0 if nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.errors import BlockError
from millpond.runtime.kv.books import path_of
from millpond.runtime.kv.catalog import open_for_care, verify_file
from millpond.runtime.kv.keys import read_key
from millpond.runtime.testing.tiny_model import tiny_gemma3

BLOCK_TOKENS = 32
PROMPTS, PROMPT_TOKENS = 12, (40, 700)
SAMPLING = SamplingParams(max_tokens=3, digest_logits=True, ignore_eos=True)
WRITE_S_MAX = 1.0  # the kill comes at most so long after the first prompt began
READY_S_MAX = 300.0


def prompts(seed: int) -> list[list[int]]:
    """Return prompts that share prefixes with one another."""
    choose = random.Random(seed)
    stems = [[choose.randrange(10, 250) for _ in range(400)] for _ in range(3)]
    found = []
    for _ in range(PROMPTS):
        count = choose.randrange(*PROMPT_TOKENS)
        stem = choose.choice(stems)[: choose.randrange(count)]
        found.append([2, *stem, *(choose.randrange(10, 250) for _ in range(count - len(stem)))])
    return found


def config(model: str, root: Path | None, budget: int) -> RuntimeConfig:
    """Return a configuration with small blocks, so that many are written."""
    return RuntimeConfig(
        model=model,
        spill=root is not None,
        spill_root=str(root) if root is not None else None,
        spill_bytes_max=budget,
        block_tokens=BLOCK_TOKENS,
        prefill_chunk_tokens=BLOCK_TOKENS,
        sliding_boundary_tokens=4 * BLOCK_TOKENS,
        limits=Limits(free_bytes_min=0),
    )


async def answer(runtime: Runtime, ids: list[int]) -> dict[str, Any]:
    """Return tokens, digests of the logits, and how many tokens came from the cache."""
    done = await runtime.generate(ids, SAMPLING)
    return {"ids": done.token_ids, "logits": done.logits_xxh3, "cached": done.usage.cached_tokens}


async def write(options: argparse.Namespace) -> None:
    """Be the process that is killed."""
    choose = random.Random(options.seed)
    async with open_runtime(config(options.model, Path(options.root), options.budget)) as runtime:
        print("ready", flush=True)
        while True:
            for ids in choose.sample(prompts(options.prompts), PROMPTS):
                await answer(runtime, ids)


@contextmanager
def writing(options: argparse.Namespace, root: Path, number: int) -> Iterator[None]:
    """Start a writer, wait until it answers; it is killed at the end."""
    command = [sys.executable, __file__, "--write", "--root", str(root), "--model", options.model]
    command += ["--seed", str(number), "--prompts", str(options.seed)]
    command += ["--budget", str(options.budget)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the writer could not start; see above")
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


def examine(root: Path, budget: int) -> dict[str, int]:
    """Open a root as the next process does; return what it accepted and what was wrong."""
    found = {"accepted": 0, "verified": 0, "temporaries": 0, "over_budget": 0}
    opened, key = open_for_care(root, budget), read_key(None, os.environ)
    try:
        for block, _ in list(opened.index.snapshot()):
            found["accepted"] += 1
            try:
                verify_file(opened.disk, path_of(block), key)
                found["verified"] += 1
            except (BlockError, OSError) as error:
                print(f"{path_of(block)}: {error}", file=sys.stderr)
        found["temporaries"] = len(list(root.rglob("*.tmp")))
        size = sum(one.stat().st_size for one in root.rglob("*") if one.is_file())
        found["over_budget"] = int(size > budget)
    finally:
        opened.close()
    return found


async def torture(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run every round; return the totals."""
    choose = random.Random(options.seed)
    asked = prompts(options.seed)
    async with open_runtime(config(options.model, None, 0)) as runtime:
        cold = [await answer(runtime, ids) for ids in asked]
    totals = dict.fromkeys(("accepted", "verified", "temporaries", "over_budget"), 0)
    answered = wrong_answers = cached = 0
    for kill in range(options.kills):
        with writing(options, root, options.seed + kill):
            await anyio.sleep(choose.random() * WRITE_S_MAX)
        found = examine(root, options.budget)
        totals = {name: totals[name] + found[name] for name in totals}
        async with open_runtime(config(options.model, root, options.budget)) as runtime:
            for number in choose.sample(range(PROMPTS), 2):
                warm = await answer(runtime, asked[number])
                answered, cached = answered + 1, cached + warm["cached"]
                same = [warm[name] == cold[number][name] for name in ("ids", "logits")]
                wrong_answers += not all(same)
        if options.verbose:
            print(f"kill {kill}: {found}", file=sys.stderr, flush=True)
    unverified = totals["accepted"] - totals["verified"]
    return {
        "kills": options.kills,
        "seed": options.seed,
        **totals,
        "answered": answered,
        "tokens_from_cache": cached,
        "wrong_answers": wrong_answers,
        "wrong": unverified + totals["temporaries"] + totals["over_budget"] + wrong_answers,
    }


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="", help="a GGUF file; default: a tiny one, made here")
    parser.add_argument("--budget", type=int, default=2_000_000, help="bytes of the root")
    parser.add_argument("--root", default="", help="keep the spill root here")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        anyio.run(write, options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            options.model = str(Path(folder) / "tiny.gguf")
            Path(options.model).write_bytes(tiny_gemma3())
        root = Path(options.root or Path(folder) / "root")
        root.mkdir(parents=True, exist_ok=True)
        report = anyio.run(torture, options, root)
    print(json.dumps(report))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
