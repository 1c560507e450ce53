#!/usr/bin/env python3
"""A server under mixed load for minutes, killed in the middle, stopped and started again.

    scripts/soak_http.py --minutes 5 --seed 3
    scripts/soak_http.py --minutes 1 --seed 4 --backend trio --clients 48

Many clients at once ask ``millpond serve`` for answers whose text is known from a server without a
cache: whole and streamed, plain and chat, greedy and with a seed.  In between they go away early,
read slowly, and send what is no request.  At half time the server gets SIGKILL in the middle of it
all, at three quarters SIGTERM, and starts again each time over the same spill root.  Prints one
JSON line.  ``wrong`` counts answers that differ, statuses that are not as expected, and ends that
are not orderly; ``leaked`` counts requests, slots, descriptors and threads that are left once
all clients are gone.  Exits 0 if both are 0.  Linux only, for ``/proc``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from millpond.runtime.testing.http_client import Answer, ask, get, hang_up, left_in, text_of
from millpond.runtime.testing.serve_process import ServeProcess, serve_process
from millpond.runtime.testing.tiny_model import tiny_gemma3

MODELS = ("a", "b")
PROMPTS = 10
PROMPT_LETTERS = (20, 1500)
REFUSED = (429, 503)  # a full queue or a server that stops: told, not wrong
BAD_BODIES: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[" * 9999, 400),
    ("/v1/completions", b'{"model":"a","prompt":"\\ud800"}', 400),
    ("/v1/completions", b'{"model":"a","prompt":[99999]}', 400),
    ("/v1/completions", b'{"model":"a","prompt":"x","max_tokens":-1}', 400),
    ("/v1/completions", b'{"model":"nobody","prompt":"x"}', 404),
    ("/v1/chat/completions", b'{"model":"a","messages":[{"role":"user","content":[{}]}]}', 400),
    ("/v1/messages", b'{"model":"a","messages":5}', 400),
    ("/nowhere", b"", 404),
    ("/health", b"{}", 405),
)


@dataclass(frozen=True)
class Job:
    """One request whose text is known."""

    path: str
    body: dict[str, Any]
    text: str = ""


@dataclass
class Soak:
    """What all clients share.

    port      of the server that runs now; 0 while none does
    epoch     counts servers: an answer across two of them proves nothing
    """

    jobs: list[Job]
    until_s: float
    port: int = 0
    epoch: int = 0
    up: anyio.Event = field(default_factory=anyio.Event)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(prog="soak_http", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(MODELS):
            Path(folder, f"{name}.gguf").write_bytes(tiny_gemma3(number))
        report = anyio.run(_soak, options, Path(folder))
    print(json.dumps({"seed": options.seed, "backend": options.backend, **report}))
    return 1 if report["wrong"] or report["leaked"] else 0


async def _soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    flags = ["--models", str(folder), "--backend", options.backend, "--deterministic"]
    jobs = await _known_jobs(options.seed, folder, [*flags, "--no-spill"])
    flags += ["--models-max", "1", "--spill-root", str(folder / "spill"), "-v"]
    flags += ["--spill-bytes-max", "20MiB", "--drain", "10"]
    started = anyio.current_time()
    soak = Soak(jobs, started + 60 * options.minutes)
    leaks: dict[str, int] = {}
    async with anyio.create_task_group() as group:
        for number in range(options.clients):
            source = random.Random(f"{options.seed} {number}")
            group.start_soon(_client, soak, source)
        for end, share in (("kill", 0.5), ("stop", 0.75), ("look", 1.0)):
            until_s = started + 60 * options.minutes * share
            leaks |= await _one_server(soak, folder, flags, (end, until_s))
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": sum(soak.counts.values()),
        "counts": dict(sorted(soak.counts.items())),
        "wrong": len(soak.wrong),
        "first_wrong": soak.wrong[:5],
        "leaked": sum(leaks.values()),
        "left": leaks,
    }


async def _one_server(
    soak: Soak, folder: Path, flags: list[str], plan: tuple[str, float]
) -> dict[str, int]:
    """Run one server until its time; end it by signal, or look at what is left in it."""
    end, until_s = plan
    async with _process(folder, flags) as process:
        for name in MODELS:  # both were loaded once: what that keeps open is no leak
            await _run(soak.jobs[MODELS.index(name)], process.port)
        files = process.open_files()
        soak.port, soak.epoch = process.port, soak.epoch + 1
        soak.up.set()
        await anyio.sleep_until(until_s)
        if end == "look":
            return await left_in(process, files)
        soak.up = anyio.Event()
        if end == "kill":
            process.child.kill()
            return {}
        code = await anyio.to_thread.run_sync(process.stop)
        if code:
            soak.wrong.append(f"exit code {code} after SIGTERM")
        return {}


@asynccontextmanager
async def _process(folder: Path, flags: list[str]) -> AsyncIterator[ServeProcess]:
    with serve_process(flags, folder / "log") as process:
        yield process


async def _known_jobs(seed: int, folder: Path, flags: list[str]) -> list[Job]:
    """Return jobs with the texts that a server without a cache gives, asked one by one."""
    jobs = _jobs(random.Random(seed))
    async with _process(folder, flags) as process:
        found = []
        for job in sorted(jobs, key=lambda one: str(one.body["model"])):
            found.append(Job(job.path, job.body, await _run(job, process.port)))
    random.Random(seed).shuffle(found)
    # the first job of each model comes first, for whoever wants one of each
    firsts = [next(one for one in found if one.body["model"] == name) for name in MODELS]
    return [*firsts, *(one for one in found if one not in firsts)]


def _jobs(choose: random.Random) -> list[Job]:
    letters = "abcdefghijklmnopqrstuvwxyz "
    stems = ["".join(choose.choices(letters, k=PROMPT_LETTERS[1])) for _ in range(3)]
    jobs = []
    for model in MODELS:
        for _ in range(PROMPTS):
            stem = choose.choice(stems)[: choose.randrange(*PROMPT_LETTERS)]
            prompt = stem + "".join(choose.choices(letters, k=20))
            base = {"model": model, "max_tokens": choose.randrange(1, 40)}
            drawn = {"temperature": 1.0, "seed": choose.randrange(1000), "top_k": 20}
            messages = [{"role": "user", "content": prompt}]
            jobs += [
                Job("/v1/completions", base | {"prompt": prompt, "temperature": 0}),
                Job("/v1/completions", base | drawn | {"prompt": prompt, "n": 2}),
                Job("/v1/chat/completions", base | drawn | {"messages": messages}),
                Job("/v1/messages", base | {"messages": messages, "temperature": 0}),
            ]
    return jobs


async def _run(job: Job, port: int) -> str:
    answer = await ask(port, job.path, json.dumps(job.body).encode())
    if answer.status != 200:
        raise RuntimeError(f"{job.path}: {answer.status} {answer.body[:300]!r}")
    return text_of(job.path, answer)


# -- clients


async def _client(soak: Soak, choose: random.Random) -> None:
    while anyio.current_time() < soak.until_s:
        await soak.up.wait()
        epoch, action = soak.epoch, choose.choices(*_ACTIONS)[0]
        try:
            with anyio.fail_after(120):
                await action(soak, choose)
        except TimeoutError:
            soak.wrong.append(f"{action.__name__}: no end")
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            if soak.up.is_set() and soak.epoch == epoch:
                await anyio.sleep(0.5)  # it may just have got its signal
            if soak.up.is_set() and soak.epoch == epoch:
                soak.wrong.append(f"{action.__name__}: the connection broke")
            soak.counts["broken by a signal"] += 1


def _check(soak: Soak, job: Job, answer: Answer) -> None:
    if answer.status in REFUSED:
        soak.counts[f"refused {answer.status}"] += 1
        if not answer.headers.get("retry-after"):
            soak.wrong.append(f"{answer.status} without retry-after")
    elif answer.status != 200:
        soak.wrong.append(f"{job.path}: {answer.status} {answer.body[:200]!r}")
    elif b'"server_stopping"' in answer.body:
        soak.counts["cut by the drain"] += 1
    elif (text := text_of(job.path, answer)) != job.text:
        soak.wrong.append(f"{job.path} {job.body}: {text!r}, expected {job.text!r}")
    else:
        soak.counts["right"] += 1
        soak.counts["warm"] += b'"cached_tokens":0' not in answer.body


async def _whole(soak: Soak, choose: random.Random) -> None:
    job = choose.choice(soak.jobs)
    _check(soak, job, await ask(soak.port, job.path, json.dumps(job.body).encode()))


async def _streamed(soak: Soak, choose: random.Random, pause_s: float = 0.0) -> None:
    job = choose.choice(soak.jobs)
    body = job.body | {"stream": True}
    _check(soak, job, await ask(soak.port, job.path, json.dumps(body).encode(), pause_s))


async def _gone(soak: Soak, choose: random.Random) -> None:
    job = choose.choice(soak.jobs)
    body = job.body | {"stream": choose.random() < 0.7, "max_tokens": 300, "ignore_eos": True}
    if job.path == "/v1/messages":
        del body["ignore_eos"]
    wait_s = choose.choice((0, 0, 0.01, 0.05, 0.2, 1.0)) * choose.random()
    await hang_up(soak.port, job.path, json.dumps(body).encode(), wait_s)
    soak.counts["gone"] += 1


async def _bad(soak: Soak, choose: random.Random) -> None:
    path, body, status = choose.choice(BAD_BODIES)
    answer = await ask(soak.port, path, body)
    if answer.status not in (status, *REFUSED):
        soak.wrong.append(f"{path} {body[:60]!r}: {answer.status}, expected {status}")
    soak.counts["bad"] += 1


async def _look(soak: Soak, choose: random.Random) -> None:
    path = choose.choice(("/metrics", "/status.json", "/v1/models", "/health", "/"))
    answer = await get(soak.port, path)
    if answer.status not in (200, *REFUSED):
        soak.wrong.append(f"{path}: {answer.status}")
    soak.counts["looked"] += 1


_slow = partial(_streamed, pause_s=0.05)
_slow.__name__ = "_slow"  # type: ignore[attr-defined]
_ACTIONS: Any = ((_whole, _streamed, _slow, _gone, _bad, _look), (4, 6, 1, 5, 2, 1))


if __name__ == "__main__":
    sys.exit(main())
