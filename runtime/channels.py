"""Arrows between actors: an ``Outbox`` encodes on send, an ``Inbox`` decodes on receive.

Invariants

(I1) ``send`` either raises and nothing was sent, or returns and the message is in the arrow: there
     is no checkpoint after the message was taken.  (anyio's memory streams may raise the
     cancellation after delivery; a staging slot would then have two owners.)
(I2) ``receive`` loses no message to a cancellation: no checkpoint follows once it took one.
(I3) The arrow is bounded in messages; ``send`` waits, ``send_nowait`` raises WouldBlock.
(I4) After the sender closed, the receiver still gets everything that was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream, Event, WouldBlock
from anyio.lowlevel import checkpoint

T = TypeVar("T")
Tap = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """One arrow: messages waiting now, its bound, and how many were ever sent."""

    name: str
    waiting: int
    capacity: int
    sent: int


class _Arrow:
    """The state that both ends share; touched on the event loop only."""

    def __init__(self, name: str, capacity: int, tap: Tap | None) -> None:
        self.name, self.capacity, self.tap = name, capacity, tap
        # mutable state, changed only by the two ends
        self.queue: deque[bytes] = deque()
        self.sent = 0
        self.sender_closed = self.receiver_closed = False
        self._changed: Event | None = None  # made by who waits: most messages wake nobody

    def notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def is_quiet(self) -> bool:
        """True iff the receiver has to wait."""
        return not (self.queue or self.sender_closed or self.receiver_closed)

    async def wait_change(self) -> None:
        if self._changed is None:
            self._changed = Event()
        await self._changed.wait()


class _End:
    def __init__(self, arrow: _Arrow) -> None:
        self._arrow = arrow

    def __repr__(self) -> str:
        arrow = self._arrow
        kind = type(self).__name__
        return f"<{kind} {arrow.name}, {len(arrow.queue)} of {arrow.capacity} waiting>"

    def statistics(self) -> ChannelStatistics:
        """Return the arrow's figures."""
        arrow = self._arrow
        return ChannelStatistics(arrow.name, len(arrow.queue), arrow.capacity, arrow.sent)

    def close(self) -> None:
        """Close this end; the other end learns of it.  Closing again does nothing."""
        raise AssertionError("an end is an Outbox or an Inbox")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Outbox(_End, Generic[T]):
    """The sending end of one arrow."""

    def __init__(self, arrow: _Arrow) -> None:
        super().__init__(arrow)
        self._encode = msgspec.msgpack.Encoder().encode

    async def send(self, message: T) -> None:
        """Send one message, waiting for room.

        Raises ClosedResourceError if this end is closed, BrokenResourceError if the receiver is.
        """
        await checkpoint()
        while len(self._arrow.queue) >= self._arrow.capacity:
            self._check_open()
            await self._arrow.wait_change()
        self.send_nowait(message)

    def send_nowait(self, message: T) -> None:
        """Send one message; raises WouldBlock if the arrow is full, else as ``send``."""
        self._check_open()
        arrow = self._arrow
        if len(arrow.queue) >= arrow.capacity:
            raise WouldBlock
        data = self._encode(message)
        if arrow.tap is not None:
            arrow.tap(arrow.name, data)
        arrow.queue.append(data)
        arrow.sent += 1
        arrow.notify()

    def room(self) -> int:
        """Count of messages that ``send_nowait`` would take now without WouldBlock."""
        return self._arrow.capacity - len(self._arrow.queue)

    def close(self) -> None:
        """Say that nothing more comes; what was sent stays receivable."""
        self._arrow.sender_closed = True
        self._arrow.notify()

    def _check_open(self) -> None:
        if self._arrow.sender_closed:
            raise ClosedResourceError
        if self._arrow.receiver_closed:
            raise BrokenResourceError


class Inbox(_End, Generic[T]):
    """The receiving end; ``async for`` ends when the sender closed and all was read."""

    def __init__(self, arrow: _Arrow, union: Any) -> None:
        super().__init__(arrow)
        self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(union).decode

    async def receive(self) -> T:
        """Return the next message; raises EndOfStream after the last one."""
        if self._arrow.is_quiet():
            await self._arrow.wait_change()
        else:
            await checkpoint()
        while True:
            try:
                return self.receive_nowait()
            except WouldBlock:
                await self._arrow.wait_change()

    def receive_nowait(self) -> T:
        """Return the next message; raises WouldBlock if none waits, EndOfStream after the last.

        Raises msgspec.ValidationError on a message that its type does not allow: a bug of the
        sender, which ends the house.
        """
        arrow = self._arrow
        if arrow.receiver_closed:
            raise ClosedResourceError
        if not arrow.queue:
            if arrow.sender_closed:
                raise EndOfStream
            raise WouldBlock
        data = arrow.queue.popleft()
        arrow.notify()
        return self._decode(data)

    def close(self) -> None:
        """Receive no more; the sender's next ``send`` raises BrokenResourceError."""
        self._arrow.receiver_closed = True
        self._arrow.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None


def channel(
    name: str, union: Any, capacity: int, tap: Tap | None = None
) -> tuple[Outbox[Any], Inbox[Any]]:
    """Make one arrow.

    union     type of the messages; what the receiver decodes to
    capacity  messages that may wait, at least 1
    tap       sees each encoded message as it is sent (recorders, simulation)
    """
    if capacity < 1:
        raise ValueError(f"channel {name}: found capacity {capacity}, expected at least 1")
    arrow = _Arrow(name, capacity, tap)
    return Outbox[Any](arrow), Inbox[Any](arrow, union)
