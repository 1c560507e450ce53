"""Workers without threads: ``InlineWorker`` at once, ``SimWorker`` in virtual time.

Both keep what ``runtime.threads`` promises: calls run one at a time in order, a call that started
is waited for whatever happens to its caller, one that waits is withdrawn, and after a stall or a
death every call raises the same typed error at once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import msgspec
from anyio import CancelScope, Event, sleep
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from millpond.runtime.errors import EngineDied, EngineError, EngineStalled
from millpond.runtime.threads import ThreadStatistics

T = TypeVar("T")


class InlineWorker:
    """Runs each call on the event loop, in no time."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name
        self._finished = 0

    async def call(self, function: Callable[[], T], stall_s: float | None = None) -> T:
        """See ``Worker.call``."""
        await checkpoint()
        self._finished += 1
        return function()

    def statistics(self) -> ThreadStatistics:
        """Return the worker's figures."""
        return ThreadStatistics(self.name, self._finished, 0, "")


class WorkerFault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault of a worker.

    call  number of the call, from 0
    kind  slow: it takes long; stall: it does not come back; die: the thread ends without an answer
    """

    call: int
    kind: str


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long calls take.

    share   of calls that take time at all; the others take none
    call_s  longest time of such a call, virtual seconds
    slow_s  time of a call that is planned to be slow
    """

    share: float = 0.2
    call_s: float = 0.01
    slow_s: float = 1.0


_PACE = Pace()


class SimWorker:
    """A simulated thread.

    take_delay  how long the file operations of the call that just ran took, or None
    """

    def __init__(
        self,
        name: str,
        seed: int,
        pace: Pace = _PACE,
        faults: Sequence[WorkerFault] = (),
        take_delay: Callable[[], float] | None = None,
    ) -> None:
        self.name, self._pace, self._take_delay = name, pace, take_delay
        self._random = random.Random(seed)
        self._faults = {fault.call: fault.kind for fault in faults}
        # mutable state, changed only in call and what it calls
        self.injected: Counter[str] = Counter()
        self.stuck: list[Callable[[], object]] = []
        self._calls = self._finished = 0
        self._busy = False
        self._queue: deque[Event] = deque()
        self._broken: EngineError | None = None

    def __repr__(self) -> str:
        state = str(self._broken) if self._broken else f"{self._finished} calls"
        return f"<SimWorker {self.name}, {state}>"

    async def call(self, function: Callable[[], T], stall_s: float | None = None) -> T:
        """See ``Worker.call``; raises EngineStalled or EngineDied as planned."""
        await checkpoint()
        await self._wait_turn()
        try:
            result = await self._run(function, stall_s)
        finally:
            self._busy = False
            if self._queue:
                self._queue[0].set()
        await checkpoint_if_cancelled()
        return result

    def statistics(self) -> ThreadStatistics:
        """Return the worker's figures."""
        broken = str(self._broken) if self._broken is not None else ""
        waiting = len(self._queue) + self._busy
        return ThreadStatistics(self.name, self._finished, waiting, broken)

    def plan(self, fault: WorkerFault) -> None:
        """Plan another fault; calls count from now on."""
        self._faults[self._calls + fault.call] = fault.kind

    def come_back(self) -> None:
        """The stuck call goes on after all, too late for its caller."""
        while self.stuck:
            self.stuck.pop()()

    async def _wait_turn(self) -> None:
        while self._busy and self._broken is None:
            turn = Event()
            self._queue.append(turn)
            try:
                await turn.wait()
            finally:
                self._queue.remove(turn)
        if self._broken is not None:
            raise self._broken
        self._busy = True

    async def _run(self, function: Callable[[], T], stall_s: float | None) -> T:
        kind = self._faults.get(self._calls, "")
        self._calls += 1
        if kind:
            self.injected[f"{self.name} {kind}"] += 1
        if kind == "die":
            self._break(EngineDied(f"{self.name}: the thread ended without an answer"))
        if kind == "stall" and stall_s is not None:
            self.stuck.append(function)
            await _last(stall_s)
            self._break(EngineStalled(f"{self.name}: a call ran longer than {stall_s:g} s"))
        await self._begin(kind)
        try:
            return function()
        finally:  # what it raises comes after the time that it took
            self._finished += 1
            delay_s = self._take_delay() if self._take_delay is not None else 0.0
            if stall_s is not None and delay_s >= stall_s:
                await _last(stall_s)
                self._break(EngineStalled(f"{self.name}: a call ran longer than {stall_s:g} s"))
            await _last(delay_s)

    async def _begin(self, kind: str) -> None:
        """Let the time of a call pass."""
        await _last(self._duration(kind))

    def _duration(self, kind: str) -> float:
        if kind in ("slow", "stall"):
            return self._pace.slow_s
        if self._random.random() < self._pace.share:
            return self._random.random() * self._pace.call_s
        return 0.0

    def _break(self, error: EngineError) -> NoReturn:
        """Everyone who waits learns of it, as does every later call."""
        self._broken = error
        for turn in self._queue:
            turn.set()
        raise error


async def _last(seconds: float) -> None:
    """Let that much time pass, whoever is cancelled meanwhile."""
    if seconds:
        with CancelScope(shield=True):
            await sleep(seconds)
