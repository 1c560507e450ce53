"""Run the choices of one request: all prompts at once, the choices of a prompt over its rows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from anyio import create_task_group, current_time
from millpond.actors.http.problems import ApiError
from millpond.actors.http.record import RequestRecord
from millpond.runtime.errors import MillpondError
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import Ask, Reading, ServedModel


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a request.

    index       its place in the answer
    ask         what the model is asked
    is_first    first of its prompt's choices: the one that counts the prompt's tokens
    """

    index: int
    ask: Ask
    is_first: bool = True


class Sink(Protocol):
    """Where tokens go; calls of different choices interleave, those of one choice are in order."""

    async def token(self, choice: Choice, token: StreamedToken) -> None:
        """Take one token."""

    async def done(self, choice: Choice, completion: Completion) -> None:
        """Take the end of a choice."""


async def run_choices(
    model: ServedModel, choices: Sequence[Choice], sink: Sink, record: RequestRecord
) -> None:
    """Run all choices at once; the first error ends the others and is raised.

    Choices of one prompt follow each other, and share one Ask with their count.  Raises the errors
    of ``Runtime.stream``, and what the sink raises.
    """
    record.phase = "queued"
    prompts = [
        choices[place : place + choice.ask.n]
        for place, choice in enumerate(choices)
        if choice.is_first
    ]
    await _all([partial(_run, model, one, sink, record) for one in prompts])


async def _run(
    model: ServedModel, choices: Sequence[Choice], sink: Sink, record: RequestRecord
) -> None:
    """Run the choices of one prompt."""
    async with model.stream(choices[0].ask) as readings:
        pairs = zip(choices, readings, strict=True)
        await _all([partial(_read, choice, tokens, sink, record) for choice, tokens in pairs])


async def _read(choice: Choice, tokens: Reading, sink: Sink, record: RequestRecord) -> None:
    async for token in tokens:
        record.saw_token(current_time())
        await sink.token(choice, token)
    completion = await tokens.result()
    record.saw_completion(completion, choice.is_first)
    await sink.done(choice, completion)


async def _all(tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run tasks at once, a single one without a group; raises the first error of ours."""
    if len(tasks) == 1:
        await tasks[0]()
        return
    try:
        async with create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of ours in a group, or the group if it holds a bug."""
    ours, others = errors.split((ApiError, MillpondError))
    if others is not None or ours is None:
        return errors
    found: BaseException = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
