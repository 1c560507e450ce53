"""The watch of a house: which requests stand still although nothing holds them up.  Pure.

A request may wait for others, for the disk and for the pinned thread; each of these waits has a
bound of its own.  What no bound covers is a mistake of ours: a message that nobody sends, a turn
that nobody gives.  It must not be silent.

Invariants

(I1) A house is stuck if it has requests, and for ``stuck_s`` no message was sent in it, no call on
     its threads ended, and none was under way.
(I2) A request is stuck if it did not move for ``stuck_s`` while ``OVERTAKEN_MAX`` that came later
     ended.  Scheduling lets a few dozen pass.
(I3) Time in which the process itself stood still, stopped or asleep, does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

OVERTAKEN_MAX = 1000
LOOKS = 8
"""Looks within ``stuck_s``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A house at one moment.

    moves     messages that were sent and calls that ended, ever
    is_busy   a call is under way on one of its threads
    next_id   id of the request that will come next
    requests  id → numbers of which one changes whenever it goes on
    """

    moves: int
    is_busy: bool
    next_id: int
    requests: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stuck:
    """What stands still: the whole house, or some requests, by id."""

    house: bool
    requests: tuple[int, ...]


@dataclass(slots=True)
class _Mark:
    at: tuple[int, ...]
    since_s: float
    ended_later: int


class Watch:
    """Compares what is seen with what was seen before."""

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        # mutable state, changed only in look
        self._looked_s = math.inf
        self._watched_s = 0.0  # a clock that goes on by two looks at most between two looks (I3)
        self._moves = -1
        self._moved_s = 0.0
        self._marks: dict[int, _Mark] = {}

    @property
    def every_s(self) -> float:
        """Seconds between two looks."""
        return self._stuck_s / LOOKS

    def look(self, now_s: float, seen: Seen) -> Stuck:
        """Return what is stuck by now."""
        self._watched_s += max(0.0, min(now_s - self._looked_s, 2 * self.every_s))
        self._looked_s, now_s = now_s, self._watched_s
        if seen.moves != self._moves or seen.is_busy or not seen.requests:
            self._moves, self._moved_s = seen.moves, now_s
        marks: dict[int, _Mark] = {}
        for place, request_id in enumerate(sorted(seen.requests, reverse=True)):
            at = seen.requests[request_id]
            mark = self._marks.get(request_id)
            if mark is None or mark.at != at:
                mark = _Mark(at, now_s, seen.next_id - 1 - request_id - place)
            marks[request_id] = mark
        self._marks = marks
        return Stuck(
            house=bool(seen.requests) and now_s - self._moved_s >= self._stuck_s,
            requests=tuple(one for one in marks if self._stands(one, now_s, seen)),
        )

    def _stands(self, request_id: int, now_s: float, seen: Seen) -> bool:
        mark = self._marks[request_id]
        if now_s - mark.since_s < self._stuck_s:
            return False
        still_here = sum(one > request_id for one in seen.requests)
        ended_later = seen.next_id - 1 - request_id - still_here
        return ended_later - mark.ended_later >= OVERTAKEN_MAX
