#!/usr/bin/env python3
"""Measure how long a host program's event loop is held up while the engine works.  One JSON line.

    scripts/bench_loop.py                      asyncio, the demo model
    scripts/bench_loop.py --backend trio --streams 8 --prompt-tokens 4096

A task sleeps 1 ms over and over; its lag is how much later than that it wakes.  It is measured
in four conditions, each as long as the work lasts:

idle      nothing else runs
control   the same work in a process of its own: what the machine's load alone does
working   eight streams decode, a long prompt is read beside them, and blocks are spilled
busy      the same, with a stream that asks for every token's log-probabilities

Aims: 99 of 100 lags at most 5 ms, none above 20 ms.  ``worst`` says how far into the work the five
longest lags were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams, open_runtime

TICK_S = 0.001
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure and print the line."""
    options = _options()
    if options.switch_interval_ms is not None:
        sys.setswitchinterval(options.switch_interval_ms / 1e3)
    if options.child:
        anyio.run(_child, options, backend=options.backend)
        return 0
    found = anyio.run(_measure, options, backend=options.backend)
    print(json.dumps(found))
    return 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {"idle": await _lags(lambda: anyio.sleep(2.0))}
    found["control"] = await _lags(lambda: _control(options))
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as root:
        async with open_runtime(_config(options, root)) as runtime:
            await _work(runtime, options, seed=1, logprobs=None)  # first kernels, first pages
            found["working"] = await _lags(lambda: _work(runtime, options, seed=2, logprobs=None))
            found["busy"] = await _lags(lambda: _work(runtime, options, seed=3, logprobs=5))
            spilled = runtime.spill_report()
    return {
        "bench": "loop",
        "backend": options.backend,
        "unit": "ms",
        "model": Path(options.model).name,
        "streams": options.streams,
        "prompt_tokens": options.prompt_tokens,
        "blas_threads": options.threads,
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        **found,
        "blocks_spilled": spilled.blocks,
        "load": [round(value, 2) for value in os.getloadavg()],
        "cores": os.cpu_count(),
    }


async def _lags(work: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """Return percentiles of the lag of a 1 ms ticker while ``work`` runs, in ms."""
    lags: list[tuple[float, float]] = []
    begun = time.perf_counter()

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(TICK_S)
            now = time.perf_counter()
            lags.append((now - before - TICK_S, now - begun))

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await work()
        group.cancel_scope.cancel()
    values = np.array([lag for lag, _ in lags]) * 1e3
    worst = sorted(lags, reverse=True)[:5]
    return {
        "p50": round(float(np.percentile(values, 50)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "p999": round(float(np.percentile(values, 99.9)), 2),
        "max": round(float(values.max()), 2),
        "ticks": len(lags),
        "seconds": round(time.perf_counter() - begun, 1),
        "worst": [[round(1e3 * lag, 1), round(at, 1)] for lag, at in worst],
    }


async def _work(
    runtime: Runtime, options: argparse.Namespace, seed: int, logprobs: int | None
) -> None:
    """Eight streams decode until the long prompt, which is spilled while it is read, is done."""
    ends = anyio.Event()

    async def stream(number: int) -> None:
        sampling = SamplingParams(max_tokens=4000, ignore_eos=True, logprobs=logprobs)
        async with runtime.stream(_prompt(64, 100 * seed + number), sampling) as tokens:
            async for _ in tokens:
                if ends.is_set():
                    return

    async def long_prompt() -> None:
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        await runtime.generate(_prompt(options.prompt_tokens, seed), sampling)
        await runtime.drain()
        ends.set()

    async with anyio.create_task_group() as group:
        for number in range(options.streams):
            group.start_soon(stream, number)
        await anyio.sleep(1.0)
        group.start_soon(long_prompt)


async def _control(options: argparse.Namespace) -> None:
    """The work in another process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL) as process:
        await process.wait()


async def _child(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as root:
        async with open_runtime(_config(options, root)) as runtime:
            await _work(runtime, options, seed=2, logprobs=None)


def _config(options: argparse.Namespace, root: str) -> RuntimeConfig:
    # one sequence more than the streams, so that the long prompt never waits for one of them
    limits = Limits(sequences_max=options.streams + 1)
    return RuntimeConfig(
        model=options.model,
        spill_root=root,
        blas_threads=options.threads,
        limits=limits,
    )


def _prompt(tokens: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300, 4000, tokens).tolist()
    return [2, *ids[1:]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--model", default=str(ROOT / "models" / "gemma3-270m.gguf"))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1, help="of the BLAS")
    parser.add_argument("--switch-interval-ms", type=float, help="of the interpreter; default 5")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
