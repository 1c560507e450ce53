"""From a checked request to its answer: acquire the model, run the choices, fill the form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from anyio import CapacityLimiter
from millpond.actors.http.board import Board
from millpond.actors.http.exchange import EventStream, Exchange
from millpond.actors.http.generation import Choice, run_choices
from millpond.actors.http.problems import unsupported
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.pool import ModelPool
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import ServedModel


@dataclass(frozen=True, slots=True)
class Services:
    """What every endpoint works with.

    readers  bounds the threads that read long bodies
    """

    pool: ModelPool
    settings: HttpSettings
    board: Board
    readers: CapacityLimiter


class Answer(Protocol):
    """An answer in the making; calls of different choices interleave."""

    def token(self, choice: Choice, token: StreamedToken) -> bytes:
        """Take a token; return the events that it makes, opening ones included, maybe none."""

    def done(self, choice: Choice, completion: Completion) -> bytes:
        """Take the end of a choice; return the events that it makes."""

    def ending(self, record: RequestRecord) -> bytes:
        """Return the events that end the stream."""

    def whole(self, record: RequestRecord) -> bytes:
        """Return the whole answer, for a request without streaming."""


Prepare = Callable[[ServedModel], Awaitable[tuple[Sequence[Choice], Answer]]]


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request.

    model    name that the client gave, or None
    stream   answer with events
    pins     the request asks for ``pin``
    prepare  makes choices and answer, once the model is there; raises ApiError or MillpondError
    """

    model: str | None
    stream: bool
    pins: bool
    prepare: Prepare


async def answer(exchange: Exchange, services: Services, job: Job) -> None:
    """Answer a request.

    Raises ApiError, MillpondError and ClientGone before the response starts.
    """
    record = exchange.record
    record.model = await services.pool.resolve(job.model)
    record.stream = job.stream
    if job.stream:
        await exchange.stream(_streaming(exchange, services, job))
        return
    answers: list[Answer] = []

    async def work() -> None:
        async with _model(exchange, services, job) as model:
            choices, form = await job.prepare(model)
            await run_choices(model, choices, _Collected(form), record)
        answers.append(form)

    await exchange.run_connected(work)
    headers = [(b"server-timing", record.server_timing().encode())]
    await exchange.respond(answers[0].whole(record), headers=headers)


def _streaming(
    exchange: Exchange, services: Services, job: Job
) -> Callable[[EventStream], Awaitable[None]]:
    async def produce(events: EventStream) -> None:
        async with _model(exchange, services, job) as model:
            choices, form = await job.prepare(model)
            await run_choices(model, choices, _Streamed(form, events), exchange.record)
        await events.write(form.ending(exchange.record))

    return produce


@asynccontextmanager
async def _model(exchange: Exchange, services: Services, job: Job) -> AsyncIterator[ServedModel]:
    exchange.record.phase = "loading"
    async with services.pool.acquire(exchange.record.model) as model:
        if job.pins and not model.can_pin:
            raise unsupported("pin")
        exchange.record.phase = "reading"
        yield model


class _Streamed:
    """A sink that writes events as they come."""

    def __init__(self, form: Answer, events: EventStream) -> None:
        self._form, self._events = form, events

    async def token(self, choice: Choice, token: StreamedToken) -> None:
        """Write what a token makes."""
        data = self._form.token(choice, token)
        if data:
            await self._events.write(data)

    async def done(self, choice: Choice, completion: Completion) -> None:
        """Write what the end of a choice makes."""
        data = self._form.done(choice, completion)
        if data:
            await self._events.write(data)


class _Collected:
    """A sink for an answer that is sent whole."""

    def __init__(self, form: Answer) -> None:
        self._form = form

    async def token(self, choice: Choice, token: StreamedToken) -> None:
        """Take a token."""
        self._form.token(choice, token)

    async def done(self, choice: Choice, completion: Completion) -> None:
        """Take the end of a choice."""
        self._form.done(choice, completion)
