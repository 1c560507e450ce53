"""``PinnedThread``: one OS thread that runs calls in order, and tells the event loop in bursts.

Invariants

(I1) A call that started is waited for; cancelling the caller does not abandon it.  A call that did
     not start yet is withdrawn.
(I2) The thread never blocks on the loop: it appends to a deque, then wakes the loop once per burst
     (append, then test the flag; the loop clears the flag, then reads).
(I3) After a stall or a death every call raises at once; nothing waits for that thread again.

MLX keeps streams, compiled functions and random state per thread, hence one thread for all of it.
It never gives a thread's streams back, nor the threads that compute for them, so an OS thread is
used again by the next ``PinnedThread``: a process that swaps models all night does not grow.
The thread is a daemon: a stuck call never keeps the process from exiting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from anyio import CancelScope, Event, get_cancelled_exc_class, move_on_after
from anyio.lowlevel import checkpoint, current_token
from millpond.runtime.errors import EngineDied, EngineError, EngineStalled, RuntimeClosed

T = TypeVar("T")
ALIVE_CHECK_S = 0.5  # how often a waiting call looks whether the thread still exists


class Worker(Protocol):
    """Runs blocking calls away from the event loop, one at a time, in order."""

    async def call(self, function: Callable[[], T], stall_s: float | None = None) -> T:
        """Run the function and return what it returns, or raise what it raises.

        stall_s  give up on the thread after this many seconds (EngineStalled); None: never
        """
        raise AssertionError("a port")


@dataclass(frozen=True, slots=True)
class ThreadStatistics:
    """One thread: calls finished, calls waiting, and why it serves no more (empty if it does).

    busy_s  for how long the call under way runs; 0 if none does
    """

    name: str
    finished: int
    waiting: int
    broken: str
    busy_s: float = 0.0


class Thread(Worker, Protocol):
    """A worker that tells how it is."""

    def statistics(self) -> ThreadStatistics:
        """Return its figures."""
        raise AssertionError("a port")


class _Ticket:
    """One call.  ``lock`` guards the step from waiting to started or withdrawn."""

    __slots__ = ("done", "error", "function", "lock", "result", "state")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.lock = threading.Lock()
        self.state = "waiting"
        self.done = Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def take(self, state: str) -> bool:
        """Move from waiting to ``state``; False if somebody was faster."""
        with self.lock:
            if self.state != "waiting":
                return False
            self.state = state
            return True


class PinnedThread:
    """An async context manager around one daemon thread; a ``Worker``."""

    def __init__(self, name: str, close_s: float = 30.0) -> None:
        self.name, self._close_s = name, close_s
        # mutable state; _finished and _wake_pending are shared with the thread, see (I2)
        self._requests: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._finished: deque[_Ticket | None] = deque()
        self._wake_pending = False
        self._exited: Event | None = None
        self._open: set[_Ticket] = set()
        self._count = 0
        self._broken: EngineError | None = None
        self._ends_well = False  # the context was left, and nothing was broken
        self._thread: _Lane | None = None
        self._began_s: float | None = None  # written by the thread
        self._soon: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        figures = self.statistics()
        state = figures.broken or f"{figures.finished} calls, {figures.waiting} waiting"
        return f"<PinnedThread {self.name}, {state}>"

    async def __aenter__(self) -> Self:
        native: Any = current_token().native_token
        self._soon = getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe
        self._exited = Event()
        self._thread = _Lane.named(self.name)
        self._thread.begin(self._main)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the thread finish what it runs, for ``close_s`` at most, and end it."""
        was_broken = self._broken is not None
        self._ends_well = not was_broken
        self._broken = self._broken or RuntimeClosed(f"{self.name}: the thread is closed")
        self._requests.put(None)
        if not was_broken and self._exited is not None:
            with move_on_after(self._close_s, shield=True):
                await self._exited.wait()

    async def call(self, function: Callable[[], T], stall_s: float | None = None) -> T:
        """Run ``function`` on the thread; see ``Worker.call``.

        Raises EngineStalled, EngineDied or RuntimeClosed if the thread cannot answer.
        """
        await checkpoint()
        if self._broken is not None:
            raise self._broken
        ticket = _Ticket(function)
        self._open.add(ticket)
        self._requests.put(ticket)
        try:
            await self._answer(ticket, stall_s)
        finally:
            self._open.discard(ticket)
        if ticket.error is not None:
            raise ticket.error
        result: T = ticket.result
        return result

    def statistics(self) -> ThreadStatistics:
        """Return the thread's figures."""
        broken = str(self._broken) if self._broken is not None else ""
        began_s = self._began_s
        busy_s = 0.0 if began_s is None else time.monotonic() - began_s
        return ThreadStatistics(self.name, self._count, len(self._open), broken, busy_s)

    async def _answer(self, ticket: _Ticket, stall_s: float | None) -> None:
        try:
            await self._wait(ticket, stall_s)
        except get_cancelled_exc_class():
            if ticket.take("withdrawn"):
                raise
            with CancelScope(shield=True):
                await self._wait(ticket, stall_s)
            raise

    async def _wait(self, ticket: _Ticket, stall_s: float | None) -> None:
        waited_s = 0.0
        while not ticket.done.is_set():
            slice_s = ALIVE_CHECK_S if stall_s is None else min(ALIVE_CHECK_S, stall_s - waited_s)
            with move_on_after(slice_s) as scope:
                await ticket.done.wait()
            if ticket.done.is_set():
                return
            if scope.cancelled_caught:
                waited_s += slice_s
                self._check_alive(stall_s, waited_s)

    def _check_alive(self, stall_s: float | None, waited_s: float) -> None:
        if self._broken is None:
            if self._thread is None or not self._thread.is_alive():
                self._break(EngineDied(f"{self.name}: the thread ended without an answer"))
            elif stall_s is not None and waited_s >= stall_s:
                self._break(EngineStalled(f"{self.name}: a call ran longer than {stall_s:g} s"))
        if self._broken is not None and not isinstance(self._broken, RuntimeClosed):
            raise self._broken

    def _break(self, error: EngineError) -> None:
        self._broken = error
        for ticket in self._open:
            ticket.take("withdrawn")

    def _main(self) -> None:
        """The thread: run tickets until told to stop."""
        try:
            while (ticket := self._requests.get()) is not None:
                if ticket.take("started"):
                    self._run(ticket)
                    ticket = None
        finally:
            if self._thread is not None and self._ends_well:
                self._thread.spare()
            self._post(None)

    def _run(self, ticket: _Ticket) -> None:
        self._began_s = time.monotonic()
        try:
            ticket.result = ticket.function()
        except BaseException as error:  # whatever it is, it belongs to the caller
            ticket.error = error
        ticket.function = _nothing  # drop what it refers to here, on this thread
        self._began_s = None
        self._post(ticket)

    def _post(self, ticket: _Ticket | None) -> None:
        self._finished.append(ticket)
        if not self._wake_pending and self._soon is not None:
            self._wake_pending = True
            try:
                self._soon(self._deliver)
            except RuntimeError:
                return  # the loop is gone, and nobody waits any more

    def _deliver(self) -> None:
        """On the loop: hand out what the thread finished."""
        self._wake_pending = False
        while self._finished:
            ticket = self._finished.popleft()
            if ticket is not None:
                self._count += 1
                ticket.done.set()
            elif self._exited is not None:
                self._exited.set()


class _Lane(threading.Thread):
    """An OS thread that runs the mains of one ``PinnedThread`` after another."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._mains: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stays = False  # this thread's own

    @classmethod
    def named(cls, name: str) -> _Lane:
        """Return a spare one, or a new one, under that name."""
        while _SPARES:
            try:
                lane = _SPARES.pop()
            except IndexError:  # another loop's thread took the last
                break
            if lane.is_alive():  # after a fork the child has none of them
                lane.name = name
                return lane
        lane = cls()
        lane.name = name
        lane.start()
        return lane

    def begin(self, main: Callable[[], None]) -> None:
        """Run ``main`` there; once after ``named``."""
        self._mains.put(main)

    def spare(self) -> None:
        """Stay for another main, if few do; from within one, as it ends."""
        if len(_SPARES) < SPARES_MAX:
            self._stays = True
            _SPARES.append(self)

    def run(self) -> None:
        """See ``threading.Thread``."""
        goes_on = True
        while goes_on:
            self._mains.get()()
            goes_on, self._stays = self._stays, False


SPARES_MAX = 16  # idle threads of a process; a runtime needs about six
_SPARES: list[_Lane] = []  # mutable state; taken and given from any thread


def _nothing() -> None:
    return None
