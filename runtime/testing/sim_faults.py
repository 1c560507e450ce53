"""Planned trouble of a simulated disk, as plain data."""

from __future__ import annotations

import msgspec
from anyio import current_time

ERRNOS = ("ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE")
SLOW_S, STUCK_S = 0.05, 10_000.0


class SimCrash(BaseException):
    """The simulated process is dead: killed, or without power."""


class DiskFault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault.

    operation  scan, read, write, append, rename, remove or claim
    nth        which call of that operation, from 0
    times      how many calls in a row, from that one on
    from_s     not counted, but every such call from that time of the process on; -1: counted
    slow_s     how long a slow call takes
    kind       ENOSPC, EIO, EROFS, EACCES, EMFILE: the call fails, perhaps half done;
               late: the call does its work and fails with EIO; slow, stuck: it takes long;
               short: a read returns too little; rot: a bit of some block flips before the call;
               vanish: somebody else removes some block before the call
    """

    operation: str
    nth: int
    kind: str
    times: int = 1
    from_s: float = -1.0
    slow_s: float = SLOW_S


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the process dies.

    operation  number of the operation within the process, from 0
    effect     how much of it is done: none, half or all
    power      the machine loses power, too
    """

    operation: int
    effect: str = "half"
    power: bool = False


class PlannedFaults:
    """The faults of one disk, by operation and number of the call, or by time."""

    def __init__(self) -> None:
        # mutable state, changed only in add
        self._counted: dict[tuple[str, int], DiskFault] = {}
        self._timed: list[tuple[float, DiskFault]] = []

    def add(self, fault: DiskFault, calls: int) -> None:
        """Add a fault; ``calls`` of its operation were made before."""
        if fault.from_s >= 0:
            self._timed.append((current_time() + fault.from_s, fault))
            return
        for number in range(fault.times):
            self._counted[fault.operation, calls + fault.nth + number] = fault

    def find(self, operation: str, nth: int) -> DiskFault | None:
        """Return what a call meets; of those by time the one that began last."""
        found = self._counted.get((operation, nth))
        if found is not None or not self._timed:
            return found
        now = current_time()
        begun = [one for one in self._timed if one[1].operation == operation and one[0] <= now]
        return max(begun, key=lambda one: one[0])[1] if begun else None
