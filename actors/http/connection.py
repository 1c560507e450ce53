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

from math import inf
from typing import Any

from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    EndOfStream,
    Lock,
    aclose_forcefully,
    create_task_group,
    current_time,
)
from anyio.abc import SocketStream, TaskGroup
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.typing import ConnectionState
from millpond.actors.http.protocol import Application, Context, Protocol, Tasks
from millpond.actors.http.settings import HttpSettings

READ_BYTES = 2**16
LINGER_S = 2.0
LINGER_BYTES_MAX = 2**26
"""What is read and thrown away of a body that was refused; more is cut off."""
AHEAD_BYTES_MAX = 4 * READ_BYTES
"""Requests that are read while one runs."""
_BROKEN = (BrokenResourceError, ClosedResourceError, EndOfStream, OSError)


class Connection:
    """Serves one socket until either side ends it."""

    def __init__(
        self, app: Application, stream: SocketStream, settings: HttpSettings, config: Config
    ) -> None:
        self._app, self._stream = app, stream
        self._settings, self._config = settings, config
        # mutable state, changed only by the tasks of run, and by stop
        self._context = Context()
        self._lock = Lock(fast_acquire=True)
        self._handling = Lock(fast_acquire=True)
        self._reading = CancelScope()  # its deadline: for a head, for a request, for lingering
        self._protocol: Protocol | None = None
        self._group: TaskGroup | None = None
        self._is_closed = False  # for sending
        self._discarded = 0

    def stop(self) -> None:
        """End after the request that runs; at once if there is none."""
        self._context.terminated.flag = True
        if self._reading.deadline < inf:
            self._reading.cancel()

    async def run(self) -> None:
        """Serve until the connection and its last request ended."""
        try:
            async with create_task_group() as group:
                protocol = Protocol(
                    self._app,
                    self._config,
                    self._context,
                    Tasks(group),
                    ConnectionState({}),
                    False,
                    None,
                    None,
                    self._take,
                )
                self._set_deadline(self._settings.head_s)
                self._protocol, self._group = protocol, group
                with self._reading:
                    await self._read(protocol)
                self._is_closed = True
                await aclose_forcefully(self._stream)
                await protocol.handle(Closed())
        finally:
            await aclose_forcefully(self._stream)

    async def _read(self, protocol: Protocol) -> None:
        """Read on while a request runs, so that the client's end is seen."""
        ahead = 0
        while self._discarded < LINGER_BYTES_MAX:
            try:
                data = await self._stream.receive(READ_BYTES)
            except _BROKEN:
                return
            if self._is_closed:
                self._discarded += len(data)
            elif protocol.is_paused:
                ahead += len(data)
                if ahead > AHEAD_BYTES_MAX:
                    return  # requests without end, while one runs
                protocol.take_ahead(data)
            else:
                ahead = 0
                await self._handle(protocol, data)

    async def _handle(self, protocol: Protocol, data: bytes) -> None:
        """Let the protocol go on with what is read; an application that is slow holds this up."""
        async with self._handling:
            if self._is_closed:
                return
            try:
                await protocol.go_on(data)
            except (H2CProtocolRequiredError, H2ProtocolAssumedError):
                self._reading.cancel()  # HTTP/1.1 is all that is spoken here

    async def _take(self, event: Any) -> None:
        """What the protocol asks of the socket."""
        match event:
            case RawData():
                await self._send(event.data)
            case Closed():
                await self._hang_up()
            case Updated(idle=True):
                self._set_deadline(self._settings.keep_alive_s)
                assert self._protocol is not None and self._group is not None, "run set them"
                if self._protocol.has_more:  # requests that came while the last one ran
                    self._group.start_soon(self._handle, self._protocol, b"")
            case Updated():
                self._set_deadline(inf)

    async def _send(self, data: bytes) -> None:
        deadline_s = current_time() + self._settings.write_stall_s
        with CancelScope(shield=True, deadline=deadline_s) as scope:  # (I2)
            async with self._lock:
                if self._is_closed:
                    return
                try:
                    await self._stream.send(data)
                    return
                except _BROKEN:
                    pass
        self._is_closed = True  # nothing was awaited since: who waits for the lock sees it
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

    def _set_deadline(self, seconds: float) -> None:
        """Wait for the client so long, from now on."""
        self._reading.deadline = current_time() + seconds
