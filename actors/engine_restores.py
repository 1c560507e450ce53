"""The engine's restores: verified planes that wait to be copied, and whose caches they built.

Invariants

(I1) A slot taken from the arrow is given back, or lost with the pinned thread, exactly once.
(I2) Planes of one request are copied in the order in which they came.
(I3) At most ``sequences_max + restores_max`` live caches exist, so requests that the store is
     restoring can always go on while those ahead of them run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from millpond.codecs.messages import Restore
from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import RestorePlanes


class Restores:
    """Used by the engine only, on the event loop."""

    def __init__(self, layout: KvLayout, pool: StagingPool, limits: Limits) -> None:
        self._layout, self._pool = layout, pool
        self._caches_max = limits.sequences_max + limits.restores_max
        # mutable state, changed only in the methods below
        self._queue: deque[Restore] = deque()
        self._caches: set[int] = set()  # requests with a live cache that do not run yet
        self._cold: set[int] = set()  # not yet admitted, and what was restored is lost

    def __len__(self) -> int:
        """Count of live caches that requests hold which do not run yet."""
        return len(self._caches)

    def take(self, message: Restore) -> None:
        """Queue planes."""
        self._queue.append(message)
        if message.starts_over:
            self._cold.discard(message.request_id)

    def due(self, running: int) -> tuple[Restore, ...]:
        """Take those that may be copied now: their cache exists, or there is room for it (I3)."""
        due: list[Restore] = []
        held: deque[Restore] = deque()
        for message in self._queue:
            known = message.request_id in self._caches
            if known or len(self._caches) + running < self._caches_max:
                self._caches.add(message.request_id)
                due.append(message)
            else:
                held.append(message)
        self._queue = held
        return tuple(due)

    def forget(self, request_id: int) -> bool:
        """Drop what a request queued or built; True iff there is a cache to free."""
        kept = deque(one for one in self._queue if one.request_id != request_id)
        self.give(one for one in self._queue if one.request_id == request_id)
        self._queue = kept
        self._cold.discard(request_id)
        return self.start(request_id)

    def start(self, request_id: int) -> bool:
        """The request runs from now on; True iff it brings a cache along."""
        found = request_id in self._caches
        self._caches.discard(request_id)
        return found

    def is_cold(self, request_id: int) -> bool:
        """Ask once, at Admit: was what had been restored lost?"""
        found = request_id in self._cold
        self._cold.discard(request_id)
        return found

    def fail(self, request_id: int) -> None:
        """What a request restored before its Admit is lost; no news if it was forgotten."""
        if request_id in self._caches:
            self._caches.discard(request_id)
            self._cold.add(request_id)

    def give(self, messages: Iterable[Restore]) -> None:
        """Give back the slots of planes that were copied or are not wanted any more."""
        for message in messages:
            self._pool.give(message.slot, message.lease)

    def clear(self, touched: Iterable[Restore]) -> None:
        """The pinned thread is gone: lose the slots it may touch, give back the others."""
        for message in touched:
            self._pool.lose(message.slot, message.lease)
        self.give(self._queue)
        self._queue.clear()
        self._caches.clear()

    def planes(self, message: Restore, context_tokens: int) -> RestorePlanes:
        """Return what the step copies in."""
        view = self._pool.view(message.slot, message.lease, message.payload_bytes)
        return RestorePlanes(
            sequence_id=message.request_id,
            group=message.group,
            first_token=message.first_token,
            tokens=self._layout.block_tokens,
            first_plane=message.first_plane,
            planes=message.planes,
            payload=view.toreadonly(),
            starts_over=message.starts_over,
            context_tokens=context_tokens,
        )
