"""Run the choices of one request, each as a request of its own to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from anyio import Event, create_task_group, current_time
from millpond.actors.http.problems import ApiError
from millpond.actors.http.record import RequestRecord
from millpond.runtime.errors import MillpondError
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import Ask, ServedModel


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
    """Run all choices; the first error ends the others and is raised.

    The first choice of each prompt reads it; its others begin with their prompt's cache, once it
    gave a token.  Raises the errors of ``Runtime.stream``, and what the sink raises.
    """
    record.phase = "queued"
    if len(choices) == 1:
        await _run(model, choices[0], (sink, record), Event())
        return
    try:
        async with create_task_group() as group:
            was_read = Event()
            for choice in choices:
                if choice.is_first:
                    was_read = Event()
                    group.start_soon(_run, model, choice, (sink, record), was_read)
                else:
                    group.start_soon(_run_after, model, choice, (sink, record), was_read)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


async def _run_after(
    model: ServedModel, choice: Choice, told: tuple[Sink, RequestRecord], was_read: Event
) -> None:
    await was_read.wait()
    await _run(model, choice, told, Event())


async def _run(
    model: ServedModel, choice: Choice, told: tuple[Sink, RequestRecord], was_read: Event
) -> None:
    """Run one choice; ``was_read`` is set once its prompt was read, or it ended."""
    sink, record = told
    async with model.stream(choice.ask) as tokens:
        async for token in tokens:
            record.saw_token(current_time())
            was_read.set()
            await sink.token(choice, token)
        completion = await tokens.result()
    was_read.set()
    record.saw_completion(completion, choice.is_first)
    await sink.done(choice, completion)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of ours in a group, or the group if it holds a bug."""
    ours, others = errors.split((ApiError, MillpondError))
    if others is not None or ours is None:
        return errors
    found: BaseException = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
