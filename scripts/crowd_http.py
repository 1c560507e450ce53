#!/usr/bin/env python3
"""A crowd at one server: 200 clients that stream at once, then 1,000 that go away at random.

    scripts/crowd_http.py
    scripts/crowd_http.py --backend trio --clients 200 --gone 1000 --rounds 4

The model is a tiny one with random weights.  In each round every client must get every token of
its stream and the right end.  Memory is read after each round; ``grown_share`` compares the last
one with the second, as the first one fills caches.  Then ``gone`` clients hang up at random moments
between the connection and the last token; ``leaked`` counts requests, slots and descriptors that
are left once they are gone.  Prints one JSON line; exits 0 if all streams were whole and nothing
leaked.  Linux only, for ``/proc``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
from millpond.runtime.testing.http_client import ask, hang_up, left_in
from millpond.runtime.testing.serve_process import ServeProcess, serve_process
from millpond.runtime.testing.tiny_model import tiny_gemma3

PATH = "/v1/completions"
AT_ONCE = 100
"""Clients that come and go at the same time."""


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(prog="crowd_http", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--gone", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.gguf").write_bytes(tiny_gemma3())
        flags = ["--model", str(folder / "a.gguf"), "--backend", options.backend]
        flags += ["--spill-root", str(folder / "spill"), "--spill-bytes-max", "20MiB"]
        with serve_process(flags, folder / "log") as process:
            report = anyio.run(_crowd, process, options)
            report["exit"] = process.stop()
    print(json.dumps({"backend": options.backend, **report}))
    return int(report["broken"] > 0 or report["leaked"] > 0 or report["exit"] != 0)


async def _crowd(process: ServeProcess, options: argparse.Namespace) -> dict[str, Any]:
    broken: list[str] = []
    seconds: list[float] = []
    resident: list[int] = []
    await _stream(process.port, 0, options.tokens, broken, seconds)
    files = process.open_files()
    for _ in range(options.rounds):
        seconds.clear()
        async with anyio.create_task_group() as group:
            for number in range(options.clients):
                group.start_soon(_stream, process.port, number, options.tokens, broken, seconds)
        resident.append(process.resident_bytes())
    await _go_away(process.port, options)
    left = await left_in(process, files)
    resident.append(process.resident_bytes())
    return {
        "clients": options.clients,
        "rounds": options.rounds,
        "gone": options.gone,
        "broken": len(broken),
        "first_broken": broken[:3],
        "round_s": {"median": round(statistics.median(seconds), 2), "last": round(max(seconds), 2)},
        "resident_mib": [one >> 20 for one in resident],
        "grown_share": round(resident[-2] / resident[min(1, len(resident) - 2)] - 1, 4),
        "leaked": sum(left.values()),
        "left": left,
    }


async def _stream(
    port: int, number: int, tokens: int, broken: list[str], seconds: list[float]
) -> None:
    body = {"prompt": f"client {number} " * 20, "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    started = anyio.current_time()
    answer = await ask(port, PATH, json.dumps(body).encode())
    seconds.append(anyio.current_time() - started)
    text = answer.body.decode()
    whole = f'"completion_tokens":{tokens},' in text and text.endswith("data: [DONE]\n\n")
    if answer.status != 200 or not whole:
        broken.append(f"{number}: {answer.status} {text[-200:]}")


async def _go_away(port: int, options: argparse.Namespace) -> None:
    choose, limit = random.Random(options.seed), anyio.CapacityLimiter(AT_ONCE)

    async def one(number: int, wait_s: float, stream: bool) -> None:
        body = {"prompt": f"gone {number} " * 40, "max_tokens": 400, "ignore_eos": True}
        async with limit:
            await hang_up(port, PATH, json.dumps(body | {"stream": stream}).encode(), wait_s)

    async with anyio.create_task_group() as group:
        for number in range(options.gone):
            wait_s = choose.choice((0.0, 0.001, 0.01, 0.1, 0.5)) * choose.random()
            group.start_soon(one, number, wait_s, choose.random() < 0.7)


if __name__ == "__main__":
    sys.exit(main())
