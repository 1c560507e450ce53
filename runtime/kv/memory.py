"""Who holds the memory of the live caches: running requests by claim, finished ones held.  Pure.

Invariants

(I1) Claims and held caches never add up to more than ``bytes_max``, but for a single claim that is
     larger, while there is nothing else.
(I2) A pinned cache is not dropped: somebody was told that it is there, and did not hear yet that it
     is not.
(I3) A name leads to a held cache, or is not known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    size: int
    names: dict[bytes, int]
    pins: int = 0


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Bytes claimed by running requests and held for the next ones, both counted, and the budget.

    hits, dropped  times that a held cache was found, and caches dropped, ever
    """

    claims: int
    claimed_bytes: int
    held: int
    held_bytes: int
    bytes_max: int | None
    hits: int
    dropped: int


class KvMemory:
    """A budget of bytes, and of held caches; those used longest ago are dropped first.

    bytes_max  None: no bound
    """

    def __init__(self, bytes_max: int | None, held_max: int) -> None:
        self._bytes_max, self._held_max = bytes_max, held_max
        # mutable state, changed only in the methods
        self._claims: dict[int, int] = {}
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._owner: dict[bytes, int] = {}
        self._claimed = self._kept = 0
        self._hits = self._dropped = 0

    def statistics(self) -> MemoryStatistics:
        """Return the figures."""
        return MemoryStatistics(
            len(self._claims),
            self._claimed,
            len(self._held),
            self._kept,
            self._bytes_max,
            self._hits,
            self._dropped,
        )

    def has_claim(self, request_id: int) -> bool:
        """True iff that request has its memory."""
        return request_id in self._claims

    def claim(self, request_id: int, size: int) -> tuple[int, ...] | None:
        """Take memory for a request; return what must be dropped for it, None if there is no room.

        A request that needs more than there is gets it once it is alone, so that it can end.
        """
        drops = self._drops_for(size)
        if drops is None:
            if self._claims or any(held.pins for held in self._held.values()):
                return None
            drops = tuple(self._held)
        for held_id in drops:
            self._drop(held_id)
        self._claims[request_id] = size
        self._claimed += size
        return drops

    def release(self, request_id: int) -> None:
        """The request is gone, and so is its live cache; no news if it had no claim."""
        self._claimed -= self._claims.pop(request_id, 0)

    def hold(self, request_id: int, size: int, names: Mapping[bytes, int]) -> tuple[int, ...]:
        """The request ended and its cache is kept; return what must be dropped.

        names  chain hash of each prefix that it serves → its tokens
        """
        self.release(request_id)
        drops = [one for one in self._outlived(names) if not self._held[one].pins]
        for one in drops:
            self._drop(one)
        self._held[request_id] = _Held(size, dict(names))
        self._owner.update(dict.fromkeys(names, request_id))
        self._kept += size
        while len(self._held) > self._held_max or self._is_over():
            oldest = next((one for one, held in self._held.items() if not held.pins), None)
            if oldest is None:
                break
            self._drop(oldest)
            drops.append(oldest)
        return tuple(drops)

    def find(self, names: Ordered[bytes]) -> tuple[int, int] | None:
        """Return the held cache that serves the first of these names, and its tokens there.

        names  chain hashes, the longest prefix first
        """
        for name in names:
            owner = self._owner.get(name)
            if owner is not None:
                self._held.move_to_end(owner)
                return owner, self._held[owner].names[name]
        return None

    def pin(self, held_id: int) -> None:
        """Keep a held cache until ``unpin``; a use of it."""
        self._held[held_id].pins += 1
        self._hits += 1

    def unpin(self, held_id: int) -> None:
        """End one ``pin``."""
        held = self._held[held_id]
        assert held.pins, "a cache is unpinned once for each pin"
        held.pins -= 1

    def _outlived(self, names: Mapping[bytes, int]) -> Iterator[int]:
        """Yield the caches that serve nothing that the new one does not serve."""
        for one, held in self._held.items():
            if held.names.keys() <= names.keys():
                yield one

    def _drops_for(self, size: int) -> tuple[int, ...] | None:
        if self._bytes_max is None:
            return ()
        over = self._claimed + self._kept + size - self._bytes_max
        drops = []
        for held_id, held in self._held.items():
            if over <= 0:
                break
            if not held.pins:
                drops.append(held_id)
                over -= held.size
        return None if over > 0 else tuple(drops)

    def _is_over(self) -> bool:
        return self._bytes_max is not None and self._claimed + self._kept > self._bytes_max

    def _drop(self, held_id: int) -> None:
        held = self._held.pop(held_id)
        self._kept -= held.size
        self._dropped += 1
        for name in held.names:
            if self._owner.get(name) == held_id:
                del self._owner[name]
