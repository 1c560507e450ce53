"""The engine's restores: verified planes that wait to be copied, and whose caches they built.

Invariants

(I1) A slot taken from the arrow is given back, or lost with the pinned thread, exactly once.
(I2) Planes of one request are copied in the order in which they came.
(I3) Planes are copied in the next step, never held back: the store has claimed the memory of a
     request before it sends the first of them, so slots come home whatever else waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from millpond.codecs.messages import Restore
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import RestorePlanes


class Restores:
    """Used by the engine only, on the event loop."""

    def __init__(self, layout: KvLayout, pool: StagingPool, context_tokens: int) -> None:
        self._layout, self._pool, self._context_tokens = layout, pool, context_tokens
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

    def due(self) -> tuple[Restore, ...]:
        """Take what came since the last step (I3)."""
        due = tuple(self._queue)
        self._queue.clear()
        self._caches.update(message.request_id for message in due)
        return due

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

    def planes(self, message: Restore) -> RestorePlanes:
        """Return what the step copies in."""
        wanted = message.context_tokens or self._context_tokens
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
            context_tokens=min(wanted, self._context_tokens),
            boundary=min(message.boundary, wanted, self._context_tokens),
        )
