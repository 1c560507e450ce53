"""``millpond generate``: one prompt, its completion, and what the cache did for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio import to_thread
from millpond.codecs.choices import SamplingParams
from millpond.runtime.cli_arguments import runtime_config, sampling_params
from millpond.runtime.cli_prompt import read_prompt
from millpond.runtime.cli_signals import until_signalled
from millpond.runtime.cli_terminal import Terminal, bytes_text
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.results import Completion

if TYPE_CHECKING:
    from millpond.runtime.api import Runtime

Opener = Callable[[RuntimeConfig], AbstractAsyncContextManager["Runtime"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    prompt   text, or token ids taken verbatim
    as_json  print one object at the end instead of the text as it comes
    pin      seconds for which the prompt's blocks stay, None: as it is
    """

    config: RuntimeConfig
    prompt: str | list[int]
    sampling: SamplingParams
    as_json: bool
    pin: float | None


@dataclass(slots=True)
class Outcome:
    """What there is to report once the house is closed; empty if a signal came first."""

    report: dict[str, Any] | None = None


def run(options: Namespace, terminal: Terminal, opener: Opener | None = None) -> int:
    """Run the command; return its exit code.

    Raises UsageError, OutputClosed and every error of ``open_runtime`` and of ``Runtime.stream``.
    """
    job = Job(
        config=runtime_config(options),
        sampling=sampling_params(options),
        prompt=read_prompt(options),
        as_json=options.json,
        pin=options.pin,
    )
    outcome = Outcome()
    work = partial(_generate, job, terminal, opener or _opener(), outcome)
    code = anyio.run(until_signalled, work, backend=options.backend)
    if outcome.report is not None and code == 0:
        if job.as_json:
            terminal.write_json(outcome.report)
        terminal.say(summary(outcome.report))
    return code


def _opener() -> Opener:
    from millpond.runtime.api import open_runtime

    return open_runtime


async def _generate(job: Job, terminal: Terminal, opener: Opener, outcome: Outcome) -> None:
    with ExitStack() as shown:
        shown.enter_context(terminal.waiting(f"loading {job.config.model}"))
        async with opener(job.config) as runtime:
            _say_problem(runtime, terminal)
            async with runtime.stream(job.prompt, job.sampling, pin=job.pin) as tokens:
                async for token in tokens:
                    shown.close()  # the line on stderr makes room for the text
                    if not job.as_json and token.text:
                        await _write(terminal, token.text)
                done = await tokens.result()
            if not job.as_json:
                await _write(terminal, "\n")
            await runtime.drain()
            _say_problem(runtime, terminal)
            _say_pin(runtime, terminal)
            outcome.report = generate_report(done, runtime)


async def _write(terminal: Terminal, text: str) -> None:
    """Off the loop, for a reader of stdout may take as long as it likes."""
    await to_thread.run_sync(terminal.write_text, text, abandon_on_cancel=True)


def _say_problem(runtime: Runtime, terminal: Terminal) -> None:
    problem = runtime.spill_report().problem
    if problem:
        terminal.say(f"millpond: spilling is off: {problem}")


def _say_pin(runtime: Runtime, terminal: Terminal) -> None:
    problem = runtime.spill_report().pin_problem
    if problem:
        terminal.say(f"millpond: the prompt is not pinned: {problem}")


def generate_report(done: Completion, runtime: Runtime) -> dict[str, Any]:
    """Return the object that ``--json`` prints; milliseconds, counts and whole file sizes."""
    identity, spilled = runtime.identity, runtime.spill_report()
    timings = msgspec.structs.replace(done.timings, load_ms=runtime.load_ms)
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "usage": msgspec.to_builtins(done.usage),
        "timings": {name: round(value, 3) for name, value in msgspec.to_builtins(timings).items()},
        "restore": {
            "blocks": done.restore.blocks,
            "bytes": done.restore.bytes,
            "misses": dict(done.restore.misses),
        },
        "spill": {
            "blocks": spilled.blocks,
            "bytes": spilled.bytes,
            "refused": spilled.refused,
        },
        "model": {
            "name": identity.name,
            "fingerprint": identity.fingerprint.hex(),
            "namespace": identity.namespace,
            "device": runtime.device,
            "kv_dtype": identity.descriptor.kv_dtype.value,
        },
    }


def summary(report: dict[str, Any]) -> str:
    """Return a report as one line for people."""
    usage, timings = report["usage"], report["timings"]
    line = (
        f"{usage['prompt_tokens']} prompt tokens, {usage['cached_tokens']} of them cached; "
        f"first token after {timings['ttft_ms']:.0f} ms; "
        f"{usage['completion_tokens']} tokens{_rate(report)} ({report['finish_reason']}); "
        f"restored {bytes_text(report['restore']['bytes'])}, "
        f"spilled {bytes_text(report['spill']['bytes'])}"
    )
    misses = ", ".join(f"{reason} {count}" for reason, count in report["restore"]["misses"].items())
    return f"{line}; misses: {misses}" if misses else line


def _rate(report: dict[str, Any]) -> str:
    """Decode speed; the first token belongs to the prefill."""
    steps, decode_ms = report["usage"]["completion_tokens"] - 1, report["timings"]["decode_ms"]
    return f", {1e3 * steps / decode_ms:.1f} tok/s" if steps > 0 and decode_ms > 0 else ""
