"""``Exchange``: one request and its response, bounded in bytes and time; ends when its client goes.

Invariants

(I1) A response starts once; after it started an error goes into the stream, never a second status.
(I2) Work for a client ends when the client is gone: its tasks are cancelled, streaming or not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from anyio import CancelScope, create_task_group, current_time, move_on_after
from millpond.actors.http.problems import ApiError, Form, from_error
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.errors import MillpondError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
GONE = 499
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed its connection before the response was whole."""


class Exchange:
    """One request; used by the task that serves it."""

    def __init__(
        self, wire: tuple[Scope, Receive, Send], record: RequestRecord, settings: HttpSettings
    ) -> None:
        self.scope, self.receive, self.send = wire
        self.record, self.settings = record, settings
        self.form: Form = "anthropic" if record.path.startswith("/v1/messages") else "openai"
        # mutable state, changed only by the serving task, but for ``cut``
        self.origin = ""  # of the page that calls and may read the answer; set once, by Front
        self.started = False
        self._body_read = False
        self._work: CancelScope | None = None
        self._cut: ApiError | None = None
        self._gone = False

    def header(self, name: bytes) -> str:
        """Return the header of a lower-case name, "" if there is none."""
        return next(
            (value.decode("latin-1") for key, value in self.scope["headers"] if key == name), ""
        )

    def cut(self, why: ApiError) -> None:
        """End the work; the client is told why."""
        self._cut = why
        if self._work is not None:
            self._work.cancel()

    # -- the request

    async def read_body(self) -> bytes:
        """Return the body.  Raises ApiError 413 or 408; ClientGone."""
        limit = self.settings.body_bytes_max
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        with move_on_after(self.settings.body_s) as scope:
            while not self._body_read:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                self._body_read = not message.get("more_body", False)
        if scope.cancelled_caught:
            raise ApiError(
                408, "body_timeout", f"the body took longer than {self.settings.body_s:g} s"
            )
        return b"".join(parts)

    # -- work for the client

    async def run_connected(
        self, work: Callable[[], Awaitable[None]], events: EventStream | None = None
    ) -> None:
        """Run work until it ends, the client goes, the time is over, or the server stops (I2).

        The body was read before.  Raises what the work raised; ClientGone; ApiError 503 or 504.

        events  what the work writes, to be filled by comments where it is silent
        """
        failure: ApiError | MillpondError | None = None
        ended = False
        async with create_task_group() as group:
            self._work = scope = group.cancel_scope
            scope.deadline = current_time() + self.settings.request_s
            if self._cut is not None:
                scope.cancel()
            group.start_soon(self._watch, scope, events)
            try:
                await work()
                ended = True
            except (ApiError, MillpondError) as error:
                failure = error
            self._work = None
            scope.cancel()
        if failure is not None:
            raise failure
        if ended:
            return
        if self._gone:
            raise ClientGone
        raise self._cut or ApiError(
            504, "request_timeout", f"the request took longer than {self.settings.request_s:g} s"
        )

    async def _watch(self, scope: CancelScope, events: EventStream | None) -> None:
        """Wait for the client's end; meanwhile fill the silence of events."""
        while not self._gone:
            with CancelScope() as waiting:
                if events is not None:
                    waiting.deadline = events.next_beat_s()
                self._gone = (await self.receive())["type"] == "http.disconnect"
            if waiting.cancelled_caught and events is not None:
                await events.beat()
        scope.cancel()

    # -- the response

    async def respond(
        self, body: bytes, *, status: int = 200, headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole response; JSON unless the headers give another content type."""
        found = list(headers)
        if not any(name == b"content-type" for name, _ in found):
            found.append((b"content-type", b"application/json"))
        found.append((b"content-length", str(len(body)).encode()))
        await self._start(status, found)
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """Send an error, unless a response started already."""
        self.record.code = error.code
        if not self.started:
            headers = error.headers()
            if not self._body_read:
                # what is left of the body would be taken for the next request
                headers.append((b"connection", b"close"))
            await self.respond(error.encoded(self.form), status=error.status, headers=headers)

    async def stream(self, produce: Callable[[EventStream], Awaitable[None]]) -> None:
        """Answer with server-sent events: ``produce`` writes them, silence is filled by comments.

        An error before the first event is raised, as ``run_connected`` does; a later one becomes
        the stream's last event.
        """
        events = EventStream(self)
        try:
            await self.run_connected(partial(produce, events), events)
        except (ApiError, MillpondError) as error:
            if not self.started:
                raise
            told = from_error(error, 0) if isinstance(error, MillpondError) else error
            self.record.code = told.code
            await events.write(_error_event(told, self.form))
        await events.end()

    async def _start(self, status: int, headers: list[Header]) -> None:
        assert not self.started, "a response starts once (I1)"
        self.started = True
        self.record.status = status
        headers.append((b"x-request-id", self.record.id.encode()))
        if self.origin:
            headers += [
                (b"access-control-allow-origin", self.origin.encode("latin-1")),
                (b"access-control-expose-headers", b"x-request-id, server-timing, retry-after"),
                (b"vary", b"origin"),
            ]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def start_events(self) -> None:
        """Send the head of a stream of events."""
        headers = list(_EVENTS)
        if self.record.ttft_ms is not None:
            headers.append((b"server-timing", self.record.server_timing().encode()))
        await self._start(200, headers)

    async def send_part(self, data: bytes, more: bool) -> None:
        """Send a part of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


class EventStream:
    """The events of one response; the head goes out with the first of them.

    Several tasks may write: each event is handed to the connection whole, without a turn of the
    loop before, and the connection sends in the order in which it was handed them.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        # mutable state, changed only in write
        self._last_s = current_time()

    async def write(self, data: bytes) -> None:
        """Send whole events.  A reader that is slow holds this up (back-pressure)."""
        if not self._exchange.started:
            await self._exchange.start_events()
        await self._exchange.send_part(data, True)
        self._last_s = current_time()

    def next_beat_s(self) -> float:
        """Return when the silence is to be filled, on the clock of the loop."""
        return self._last_s + self._exchange.settings.heartbeat_s

    async def beat(self) -> None:
        """Send a comment if nothing was sent for ``heartbeat_s``."""
        if current_time() >= self.next_beat_s():
            await self.write(b": still working\n\n")

    async def end(self) -> None:
        """Send the end."""
        if not self._exchange.started:
            await self._exchange.start_events()
        await self._exchange.send_part(b"", False)


def data_event(data: bytes, name: str = "") -> bytes:
    """Return one event; ``data`` has no newline."""
    if name:
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
    return b"data: %s\n\n" % data


def _error_event(error: ApiError, form: Form) -> bytes:
    return data_event(error.encoded(form), "error" if form == "anthropic" else "")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body has more than {limit} bytes")
