"""What the HTTP server adds to the embedded runtime: to the first token, and per token.

    scripts/bench_http.py --backend trio

The same prompt runs on one runtime, embedded and over loopback HTTP, turn by turn in one process:
embedded, a raw client, the official ``openai`` client, over connections that are kept.  Each client
also asks a server that replays a recorded answer at once: what that takes is the client's own.
``adds`` is what a client waits longer than an embedded caller, ``server_adds`` the same without the
client's own part.  A tiny model with random weights runs; its steps differ by more than the server
takes, hence many rounds, and differences within a round.  ``idle`` is server and raw client over a
model that gives letters and takes no time.  Prints one JSON line of medians and spreads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream
from millpond.actors.http.listening import Server, bound_socket
from millpond.actors.http.routes import make_app, make_services
from millpond.actors.http.settings import HttpSettings
from millpond.codecs.choices import SamplingParams
from millpond.runtime.api import open_shared
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.pool import PoolSettings, open_pool
from millpond.runtime.pool_models import PoolModels
from millpond.runtime.served import Ask, ServedModel
from millpond.runtime.testing.fake_served import FakeServed
from millpond.runtime.testing.tiny_model import tiny_gemma3

WARM_ROUNDS = 3
PROMPT = [1, *(261 + index % 26 for index in range(63))]


@dataclass(frozen=True, slots=True)
class Run:
    """Milliseconds to the first token, and microseconds per token after it.

    cpu_us  of this process, per token from the request on: what other load cannot stretch much
    """

    first_ms: float
    token_us: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What is asked: a model, and the port of a server of it, or of one that replays its answer."""

    model: ServedModel
    port: int


Ask1 = Callable[[int], Awaitable[Run]]
"""Asks for a count of tokens over a connection that is there, as it is for any second call."""
_SERVERS = ("embedded", "raw", "openai", "raw_alone", "openai_alone", "idle")


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(prog="bench_http", description=__doc__)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--firsts", type=int, default=200, help="rounds of two tokens each")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of many tokens")
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    found = anyio.run(_bench, options, backend=options.backend)
    print(json.dumps({"backend": options.backend, "load": os.getloadavg()[0], **found}))
    return 0


async def _bench(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for kind, rounds, tokens in (
        ("first_ms", options.firsts, 2),
        ("token_us", options.rounds, options.tokens),
    ):
        runs = await _rounds(rounds, tokens)
        report[kind] = {"rounds": rounds, "tokens": tokens}
        for name, found in runs.items():
            report[kind][name] = _spread([getattr(one, kind) for one in found])
        for name in ("raw", "openai"):
            alone = [runs["embedded"], runs[f"{name}_alone"]]
            report[kind][f"{name}_adds"] = _added(kind, runs[name], alone[:1])
            report[kind][f"{name}_server_adds"] = _added(kind, runs[name], alone)
        report[kind]["cpu_us"] = {
            name: round(statistics.median(one.cpu_us for one in found), 1)
            for name, found in runs.items()
        }
    return report


async def _rounds(rounds: int, tokens: int) -> dict[str, list[Run]]:
    """Ask in every way in turn; the first rounds warm up."""
    runs: dict[str, list[Run]] = {name: [] for name in _SERVERS}
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(_running())
        canned = await stack.enter_async_context(_replaying(bench, tokens))
        idle = await stack.enter_async_context(_idle())
        ways: dict[str, Ask1] = {"embedded": partial(_embedded, bench)}
        for name, asked in (("raw", bench), ("raw_alone", canned), ("idle", idle)):
            ways[name] = await stack.enter_async_context(_raw(asked))
        for name, asked in (("openai", bench), ("openai_alone", canned)):
            ways[name] = await stack.enter_async_context(_openai(asked))
        for number in range(-WARM_ROUNDS, rounds):
            for name in _SERVERS:
                run = await ways[name](tokens)
                if number >= 0:
                    runs[name].append(run)
    return runs


def _added(kind: str, runs: list[Run], less: list[list[Run]]) -> float:
    """Return the median of what a run takes more than others of its round."""
    rounds = zip(runs, *less, strict=True)
    more: list[float] = [
        getattr(one, kind) - sum(getattr(other, kind) for other in others)
        for one, *others in rounds
    ]
    return round(statistics.median(more), 3)


@asynccontextmanager
async def _running() -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        path.write_bytes(tiny_gemma3())
        config, settings = RuntimeConfig(model="", spill=False), HttpSettings()
        catalogue, stopping = Catalogue([("tiny", str(path))]), anyio.Event()
        async with AsyncExitStack() as stack:
            shared = await stack.enter_async_context(open_shared(config))
            models = PoolModels(config, shared, 2)
            pool = await stack.enter_async_context(
                open_pool(catalogue, PoolSettings(), models.open, models.measure)
            )
            model = await stack.enter_async_context(pool.acquire("tiny"))
            listening = stack.enter_context(bound_socket("127.0.0.1", 0))
            group = await stack.enter_async_context(anyio.create_task_group())
            server = Server(make_app(make_services(pool, settings)), settings)
            group.start_soon(server.serve, listening, stopping, 1.0)
            yield Bench(model, listening.getsockname()[1])
            stopping.set()


@asynccontextmanager
async def _replaying(bench: Bench, tokens: int) -> AsyncIterator[Bench]:
    """Answer every completion with the bytes of one that the real server gave."""
    async with await anyio.connect_tcp("127.0.0.1", bench.port) as stream:
        await stream.send(_request(tokens))
        recorded = b""
        while not recorded.endswith(_END):
            recorded += await stream.receive()
    listing = b"HTTP/1.1 200 \r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n"
    listing += b'{"data":[]}'

    async def replay(stream: SocketStream) -> None:
        async with stream:
            data = b""
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    data += await stream.receive()
                    if data.startswith(b"GET") and b"\r\n\r\n" in data:
                        data = b""
                        await stream.send(listing)
                    elif data.endswith(b"}"):
                        data = b""
                        await stream.send(recorded)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, replay)
        yield replace(bench, port=listener.extra(SocketAttribute.local_port))
        group.cancel_scope.cancel()


@asynccontextmanager
async def _idle() -> AsyncIterator[Bench]:
    """Serve a model that takes no time."""
    model, settings, stopping = FakeServed(context_tokens=10**6), HttpSettings(), anyio.Event()

    @asynccontextmanager
    async def opened(path: str) -> AsyncIterator[FakeServed]:
        yield model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        path.write_bytes(b"")
        catalogue = Catalogue([("tiny", str(path))])
        async with AsyncExitStack() as stack:
            opening = open_pool(catalogue, PoolSettings(), opened, lambda path: 1)
            pool = await stack.enter_async_context(opening)
            listening = stack.enter_context(bound_socket("127.0.0.1", 0))
            group = await stack.enter_async_context(anyio.create_task_group())
            server = Server(make_app(make_services(pool, settings)), settings)
            group.start_soon(server.serve, listening, stopping, 1.0)
            yield Bench(model, listening.getsockname()[1])
            stopping.set()


async def _embedded(bench: Bench, tokens: int) -> Run:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    marks, started = [], _now()
    async with bench.model.stream(Ask(prompt=PROMPT, sampling=sampling)) as (found,):
        async for _ in found:
            marks.append(time.perf_counter())
    return _run_of(started, marks[0], marks[-1], tokens)


@asynccontextmanager
async def _raw(bench: Bench) -> AsyncIterator[Ask1]:
    async with await anyio.connect_tcp("127.0.0.1", bench.port) as stream:

        async def ask(tokens: int) -> Run:
            first, started = 0.0, _now()
            await stream.send(_request(tokens))
            tail = b""
            while not tail.endswith(_END):
                tail = tail[-64:] + await stream.receive()
                if not first and b"data: " in tail:
                    first = time.perf_counter()
            return _run_of(started, first, time.perf_counter(), tokens)

        yield ask


_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def _request(tokens: int) -> bytes:
    body = json.dumps(_body(tokens) | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def _openai(bench: Bench) -> AsyncIterator[Ask1]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{bench.port}/v1", api_key="x") as client:

        async def ask(tokens: int) -> Run:
            body, marks = _body(tokens), []
            extra = {"ignore_eos": body.pop("ignore_eos")}
            started = _now()
            stream = await client.completions.create(**body, stream=True, extra_body=extra)
            async for _ in stream:
                marks.append(time.perf_counter())
            return _run_of(started, marks[0], marks[-1], tokens)

        yield ask


def _body(tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _run_of(started: tuple[float, float], first: float, last: float, tokens: int) -> Run:
    cpu_s = time.process_time() - started[1]
    return Run(
        1e3 * (first - started[0]), 1e6 * (last - first) / (tokens - 1), 1e6 * cpu_s / tokens
    )


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "low": round(ordered[0], 3),
        "high": round(ordered[-1], 3),
    }


if __name__ == "__main__":
    sys.exit(main())
