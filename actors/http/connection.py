"""``Connection``: one client's HTTP/1.1 connection, Hypercorn's protocol over an anyio socket.

Hypercorn's own connections are not used because a reader that stops reading holds them for ever: on
trio a send is shielded, on asyncio a close waits for the buffer.  Here a send has its time, and a
connection that exceeds it is reset.

Invariants

(I1) Whatever a client does, its connection ends within the bounds of HttpSettings once its request
     ended, and a request is told (``http.disconnect``) once its connection is gone.
(I2) A send is never cut in the middle by a cancelled request: it is finished, or the connection is.
(I3) A connection that is closed in order first says so, then reads on for ``LINGER_S``: closing a
     socket with unread data would take the response from the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import Any

import h11
from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    EndOfStream,
    Event,
    Lock,
    aclose_forcefully,
    create_memory_object_stream,
    create_task_group,
    current_time,
    move_on_after,
)
from anyio.abc import SocketStream, TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.typing import ConnectionState
from millpond.actors.http.problems import ApiError
from millpond.actors.http.settings import HttpSettings

READ_BYTES = 2**16
LINGER_S = 2.0
LINGER_BYTES_MAX = 2**26
"""What is read and thrown away of a body that was refused; more is cut off."""
APP_QUEUE = 4
"""Parts of a body that wait for the application; each is one read."""
_NO_HTTP = "what came is no HTTP/1.1 request"
_REASONS = {431: "the head is too large", 501: "the transfer encoding is none that is known"}
_BROKEN = (BrokenResourceError, ClosedResourceError, EndOfStream, OSError)
Application = Callable[[Any, Any, Any], Awaitable[None]]
Put = Callable[[dict[str, Any]], Awaitable[None]]


def protocol_config(settings: HttpSettings) -> Config:
    """Return what Hypercorn's protocol needs to know."""
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.h11_max_incomplete_size = settings.head_bytes_max
    config.include_server_header = False
    return config


class Connection:
    """Serves one socket until either side ends it."""

    def __init__(
        self, app: Application, stream: SocketStream, settings: HttpSettings, config: Config
    ) -> None:
        self._app, self._stream = app, stream
        self._settings, self._config = settings, config
        # mutable state, changed only by the tasks of run, and by stop
        self._context = _Context()
        self._lock = Lock()
        self._reading = CancelScope()
        self._deadline_s = inf  # for a whole head, or for lingering
        self._deadline_changed = Event()
        self._is_closed = False  # for sending
        self._is_over = False
        self._discarded = 0

    def stop(self) -> None:
        """End after the request that runs; at once if there is none."""
        self._context.terminated.flag = True
        if self._deadline_s < inf:
            self._reading.cancel()

    async def run(self) -> None:
        """Serve until the connection and its last request ended."""
        try:
            async with create_task_group() as group:
                protocol: Any = _Protocol(
                    self._app,  # type: ignore[arg-type]
                    self._config,
                    self._context,  # type: ignore[arg-type]
                    _Tasks(group),  # type: ignore[arg-type]
                    ConnectionState({}),
                    False,
                    None,
                    None,
                    self._take,
                )
                self._set_deadline(self._settings.head_s)
                group.start_soon(self._watch_deadline)
                with self._reading:
                    await self._read(protocol)
                self._is_closed = self._is_over = True
                self._set_deadline(inf)
                await aclose_forcefully(self._stream)
                await protocol.handle(Closed())
        finally:
            await aclose_forcefully(self._stream)

    async def _read(self, protocol: Any) -> None:
        while self._discarded < LINGER_BYTES_MAX:
            try:
                data = await self._stream.receive(READ_BYTES)
            except _BROKEN:
                return
            if self._is_closed:
                self._discarded += len(data)
                continue
            try:
                await protocol.handle(RawData(data))
            except (H2CProtocolRequiredError, H2ProtocolAssumedError):
                return  # HTTP/1.1 is all that is spoken here

    async def _take(self, event: Any) -> None:
        """What the protocol asks of the socket."""
        match event:
            case RawData():
                await self._send(event.data)
            case Closed():
                await self._hang_up()
            case Updated():
                self._set_deadline(self._settings.keep_alive_s if event.idle else inf)

    async def _send(self, data: bytes) -> None:
        with CancelScope(shield=True):  # (I2)
            async with self._lock:
                if self._is_closed:
                    return
                with move_on_after(self._settings.write_stall_s) as scope:
                    try:
                        await self._stream.send(data)
                        return
                    except _BROKEN:
                        pass
                self._is_closed = True
                if scope.cancelled_caught:
                    await aclose_forcefully(self._stream)
                self._reading.cancel()

    async def _hang_up(self) -> None:
        with CancelScope(shield=True):
            async with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
                try:
                    await self._stream.send_eof()
                except _BROKEN:
                    self._reading.cancel()
        self._set_deadline(LINGER_S)  # (I3)

    # -- bounded waiting for the client

    def _set_deadline(self, seconds: float) -> None:
        self._deadline_s = current_time() + seconds
        self._deadline_changed.set()
        self._deadline_changed = Event()

    async def _watch_deadline(self) -> None:
        while not self._is_over:
            changed = self._deadline_changed
            with move_on_after(self._deadline_s - current_time()) as scope:
                await changed.wait()
            if scope.cancelled_caught:
                self._reading.cancel()
                return


class _Protocol(H11Protocol):
    """Hypercorn's HTTP/1.1, with errors that have a body."""

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


class _Context:
    """Hypercorn's worker: one per connection."""

    event_class = _Flag

    def __init__(self) -> None:
        self.terminated = _Flag()

    async def mark_request(self) -> None:
        """A request began: nothing here counts them."""


class _Tasks:
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
            return await take.receive()
        except EndOfStream:
            return {"type": "http.disconnect"}

    try:
        with take:
            await app(scope, receive, send)
    finally:
        with CancelScope(shield=True):
            await send(None)
