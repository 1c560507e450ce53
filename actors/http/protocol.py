"""Hypercorn's HTTP/1.1 protocol, and what it wants around it: a configuration, flags and tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11
from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    EndOfStream,
    Event,
    WouldBlock,
    create_memory_object_stream,
)
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H11Protocol
from millpond.actors.http.problems import ApiError
from millpond.actors.http.settings import HttpSettings

Put = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]
APP_QUEUE = 4
"""Parts of a body that wait for the application; each is one read."""
_REASONS = {431: "the head is too large", 501: "the transfer encoding is none that is known"}
_NO_HTTP = "what came is no HTTP/1.1 request"


def protocol_config(settings: HttpSettings) -> Config:
    """Return what Hypercorn's protocol needs to know."""
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.h11_max_incomplete_size = settings.head_bytes_max
    config.include_server_header = False
    return config


class Protocol(H11Protocol):
    """Hypercorn's HTTP/1.1, with errors that have a body; a head goes out with what follows it.

    Two writes would be two packets and two wake-ups of the client, between which the event loop
    turns: about a third of a millisecond before the first token.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # mutable state, changed only in _send_h11_event
        self._head = b""

    @property
    def is_paused(self) -> bool:
        """True while a whole request runs: what comes now is the next one's."""
        return self.connection.their_state is h11.DONE

    @property
    def has_more(self) -> bool:
        """True if something was read that was not looked at."""
        return bool(self.connection.trailing_data[0])

    def take_ahead(self, data: bytes) -> None:
        """Keep what comes while a request runs."""
        self.connection.receive_data(data)

    async def go_on(self, data: bytes) -> None:
        """Look at what was read, and at ``data``, up to the end of a request."""
        if data:
            self.connection.receive_data(data)
        with suppress(_RequestRuns):
            await self._handle_events()

    async def _send_h11_event(self, event: Any) -> None:
        """Send an event; the head of a response waits for the next one, which always comes."""
        try:
            data = self._head + (self.connection.send(event) or b"")
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        self._head = data if isinstance(event, h11.Response) else b""
        if data and not self._head:
            await self.send(RawData(data=data))

    async def _send_error_response(self, status_code: int) -> None:
        """Refuse what is no request; ``status_code`` is h11's."""
        error = ApiError(status_code, "invalid_http", _REASONS.get(status_code, _NO_HTTP))
        body = error.encoded("openai")
        headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await self._send_h11_event(
            h11.Response(status_code=status_code, headers=[*error.headers(), *headers])
        )
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _RequestRuns(Exception):
    """The next request cannot begin before this one has its response."""


class _Flag:
    """Hypercorn's event, of which only ``is_set`` matters here."""

    def __init__(self) -> None:
        self.flag = False
        self._event = Event()

    async def set(self) -> None:
        """Set it."""
        self.flag = True
        self._event.set()

    async def clear(self) -> None:
        """Clear it."""
        self.flag = False
        self._event = Event()

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self.flag


class _CanRead(_Flag):
    """The protocol would wait on it for the end of a request; the connection comes back instead."""

    async def wait(self) -> None:
        """Raise _RequestRuns."""
        raise _RequestRuns


class Context:
    """Hypercorn's worker: one per connection."""

    event_class = _CanRead

    def __init__(self) -> None:
        self.terminated = _Flag()

    async def mark_request(self) -> None:
        """A request began: nothing here counts them."""


class Tasks:
    """Hypercorn's task group: each request is a task of its connection."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group

    async def spawn_app(
        self, app: Application, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Put:
        """Start the application; return how it is told of the body and of the client's end."""
        give, take = create_memory_object_stream[dict[str, Any]](APP_QUEUE)
        self._group.start_soon(_run_app, app, scope, take, send)

        async def put(message: dict[str, Any]) -> None:
            if message["type"] == "http.disconnect":
                # said by the end of the parts: the application itself may be the one that tells,
                # and would wait for ever for room behind a body that it does not read
                give.close()
                return
            # an application may end without reading on
            with suppress(BrokenResourceError, ClosedResourceError):
                try:
                    give.send_nowait(message)  # no turn of the loop where there is room
                except WouldBlock:
                    await give.send(message)

        return put


async def _run_app(
    app: Application,
    scope: Any,
    take: MemoryObjectReceiveStream[dict[str, Any]],
    send: Callable[[Any], Awaitable[None]],
) -> None:
    async def receive() -> dict[str, Any]:
        try:
            try:
                return take.receive_nowait()
            except WouldBlock:
                return await take.receive()
        except EndOfStream:
            return {"type": "http.disconnect"}

    try:
        with take:
            await app(scope, receive, send)
    finally:
        with CancelScope(shield=True):
            await send(None)
