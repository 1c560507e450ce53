"""Staging pools: a fixed count of host buffers (slots) that payloads pass through.

Invariants

(I1) Holding a descriptor is owning its slot: it is passed on or given back, on every path.
(I2) A lease is the number of one lending; a slot is read, written or given back only under its
     current lease, so a stale or second return is refused and never frees a slot that is lent anew.
(I3) A slot that a stuck operation may still write to is lost, never lent again.
(I4) A pool never holds more than slots · slot_bytes.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from anyio import Event
from anyio.lowlevel import checkpoint


@dataclass(frozen=True, slots=True)
class Lease:
    """One lending: the slot, the lease's number and the writable buffer of the length asked for."""

    slot: int
    lease: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class StagingStatistics:
    """One pool: slots in all, lent, lost for good; lendings and refusals ever; bytes held."""

    name: str
    slots: int
    lent: int
    lost: int
    lendings: int
    refused: int
    bytes: int


class StaleLease(AssertionError):
    """A slot was used under a lease that is not its current one: a programmer's error."""


class SlotsLost(ValueError):
    """No slot of a pool is left: stuck operations may still write to all of them."""


class StagingPool:
    """Slots of one purpose; used on the event loop only, the buffers on any thread."""

    def __init__(self, name: str, slots: int, slot_bytes: int) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"staging pool {name}: found {slots} slots of {slot_bytes} bytes")
        self.name, self.slots, self.slot_bytes = name, slots, slot_bytes
        # mutable state, changed only by lend, give and lose
        self._free = list(range(slots - 1, -1, -1))
        self._memory: list[mmap.mmap | None] = [None] * slots
        self._leases: dict[int, int] = {}
        self._lost: set[int] = set()
        self._lendings = self._refused = 0
        self._changed: Event | None = None  # made by who waits

    def __repr__(self) -> str:
        return f"<StagingPool {self.name}, {len(self._leases)} of {self.slots} lent>"

    async def lend(self, size: int) -> Lease:
        """Lend a slot of ``size`` bytes, waiting until one is free.

        Raises ValueError if no slot can hold that much, SlotsLost if every slot was lost.
        """
        await checkpoint()
        while True:
            lease = self._take(size)
            if lease is not None:
                return lease
            if len(self._lost) == self.slots:
                raise SlotsLost(f"staging pool {self.name}: every slot was lost")
            if self._changed is None:
                self._changed = Event()
            await self._changed.wait()

    def try_lend(self, size: int) -> Lease | None:
        """Lend a slot of ``size`` bytes, or return None and count a refusal."""
        lease = self._take(size)
        if lease is None:
            self._refused += 1
        return lease

    def available(self) -> int:
        """Count of slots that could be lent now."""
        return len(self._free)

    def view(self, slot: int, lease: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of a lent slot; raises StaleLease."""
        self._check(slot, lease)
        return self._buffer(slot, size)

    def give(self, slot: int, lease: int) -> None:
        """Give a slot back; raises StaleLease on a second or stale return (I2)."""
        self._check(slot, lease)
        del self._leases[slot]
        self._free.append(slot)
        self._notify()

    def lose(self, slot: int, lease: int) -> None:
        """Set a slot aside for good (I3); raises StaleLease."""
        self._check(slot, lease)
        del self._leases[slot]
        self._lost.add(slot)
        self._notify()

    def statistics(self) -> StagingStatistics:
        """Return the pool's figures."""
        held = sum(len(memory) for memory in self._memory if memory is not None)
        lent, lost = len(self._leases), len(self._lost)
        return StagingStatistics(
            self.name, self.slots, lent, lost, self._lendings, self._refused, held
        )

    def _take(self, size: int) -> Lease | None:
        if size > self.slot_bytes:
            raise ValueError(
                f"staging pool {self.name}: found {size} bytes, expected at most {self.slot_bytes}"
            )
        if not self._free:
            return None
        slot = self._free.pop()
        self._lendings += 1
        self._leases[slot] = self._lendings
        return Lease(slot, self._lendings, self._buffer(slot, size))

    def _buffer(self, slot: int, size: int) -> memoryview:
        memory = self._memory[slot]
        if memory is None:
            memory = self._memory[slot] = mmap.mmap(-1, self.slot_bytes)
        return memoryview(memory)[:size]

    def _check(self, slot: int, lease: int) -> None:
        found = self._leases.get(slot)
        if found != lease:
            raise StaleLease(f"{self.name} slot {slot}: found lease {lease}, expected {found}")

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
