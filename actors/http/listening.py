"""Sockets that clients connect to, and the loop that serves them.

Invariants

(I1) The socket file of a Unix socket is ours only if nobody else answers on it; it goes at the end.
(I2) One connection's failure, whatever it is, ends that connection only.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anyio import (
    BrokenResourceError,
    CancelScope,
    Event,
    aclose_forcefully,
    create_task_group,
    current_time,
    move_on_after,
    sleep,
)
from anyio.abc import SocketListener, SocketStream
from millpond.actors.http.connection import Connection
from millpond.actors.http.front import Front
from millpond.actors.http.problems import ApiError
from millpond.actors.http.protocol import protocol_config
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.errors import ConfigError

_log = logging.getLogger("millpond.http")
BACKLOG = 512
"""Connections that the kernel holds until they are accepted; a burst of 200 clients must fit."""
PROBE_S = 1.0
CUT_S = 5.0
"""Time that requests get to end after they were cut; their tasks only unwind."""
ACCEPT_PAUSE_S = 0.1
"""Pause after the system had no descriptor or memory for a connection."""
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on TCP; port 0 chooses one.  Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    with opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
            opened.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        opened.setblocking(False)
        yield opened


@contextmanager
def bound_unix_socket(path: str) -> Iterator[socket.socket]:
    """Listen on a Unix socket that only this user may open (I1).  Raises ConfigError."""
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        before = os.umask(0o177)
        try:
            opened.bind(path)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
        finally:
            os.umask(before)
        node = os.stat(path).st_ino
        try:
            opened.listen(BACKLOG)
            opened.setblocking(False)
            yield opened
        finally:
            _unlink_own(path, node)


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody answers on; raises ConfigError for anything else there."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
    raise ConfigError(f"{path}: another server listens there")


def _unlink_own(path: str, node: int) -> None:
    try:
        if os.lstat(path).st_ino == node:
            os.unlink(path)
    except OSError:
        pass


async def _turn_away(stream: SocketStream) -> None:
    """Say why, to a client that is one too many."""
    error = ApiError(503, "too_many_connections", "the server has too many connections")
    body = error.encoded("openai")
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 2\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with move_on_after(PROBE_S):
        with suppress(BrokenResourceError, OSError):
            await stream.send(head.encode() + body)
    await aclose_forcefully(stream)


class Server:
    """Accepts connections, bounded in number, until it is stopped."""

    def __init__(self, front: Front, settings: HttpSettings) -> None:
        self._front, self._settings = front, settings
        self._config = protocol_config(settings)
        # mutable state, changed only by the tasks of serve
        self._connections: set[Connection] = set()
        self._changed = Event()

    def __repr__(self) -> str:
        return f"<Server {len(self._connections)} connections, {self._front.live} requests>"

    @property
    def connections(self) -> int:
        """Count of open connections."""
        return len(self._connections)

    async def serve(self, listening: socket.socket, stopping: Event, drain_s: float) -> None:
        """Serve a listening socket until ``stopping`` is set; then drain and return.

        drain_s  what requests get that run when it is set; those left then are cut
        """
        listener = await SocketListener.from_socket(listening)
        try:
            async with create_task_group() as group:
                accepting = CancelScope()
                group.start_soon(self._accept, listener, accepting)
                await stopping.wait()
                accepting.cancel()
                await self._drain(current_time() + drain_s)
                group.cancel_scope.cancel()
        finally:
            await listener.aclose()

    async def _accept(self, listener: SocketListener, accepting: CancelScope) -> None:
        async with create_task_group() as group:
            with accepting:
                while True:
                    try:
                        stream = await listener.accept()
                    except OSError as error:
                        if error.errno not in _PASSING:
                            raise
                        await sleep(ACCEPT_PAUSE_S)
                        continue
                    group.start_soon(self._connected, stream)
            await listener.aclose()  # the kernel refuses clients from now on

    async def _connected(self, stream: SocketStream) -> None:
        connection = Connection(self._front, stream, self._settings, self._config)
        self._connections.add(connection)
        try:
            if len(self._connections) > self._settings.connections_max:
                await _turn_away(stream)
                return
            await connection.run()
        except Exception as error:  # (I2)
            _log.error("a connection failed: %s", type(error).__name__)
        finally:
            self._connections.discard(connection)
            self._changed.set()
            self._changed = Event()

    async def _drain(self, until_s: float) -> None:
        self._front.stop()
        for connection in self._connections:
            connection.stop()
        with move_on_after(until_s - current_time()):
            await self._wait_empty()
        self._front.cut()
        with move_on_after(CUT_S):
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        while self._connections:
            await self._changed.wait()
