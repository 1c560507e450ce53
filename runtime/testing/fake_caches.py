"""``GroupCache``: the live rows of one sequence and layer group in the fake model."""

from __future__ import annotations

from typing import Any

import numpy as np
from millpond.runtime.kv.layout import LayerGroup
from millpond.runtime.testing.fake_rows import Bytes


class GroupCache:
    """The live rows of one sequence and group: (planes, kv_heads, slots, bytes of head_dim).

    A fork gets what the real cache could give it: the rows that its last chunk saw, or saw and
    added, or those that were restored; whoever asks for others asked too late.
    """

    def __init__(self, group: LayerGroup, window: int, context_tokens: int) -> None:
        self._group, self._window = group, window
        self._ring = 0 if group.is_full else window
        width = group.head_dim * group.dtype.elem_bytes
        slots = self._ring or context_tokens
        # mutable state, changed only in put, prefill and restore
        self._rows = np.zeros((group.planes, group.kv_heads, slots, width), np.uint8)
        self._before: tuple[int, Bytes] | None = None
        self._chunk = (0, self._rows[:, :, :0])
        self._end = 0
        self._restored: dict[int, int] = {}  # plane → end of its restored rows

    def prefill(self, first: int, rows: Bytes) -> None:
        """Add the rows of a chunk, which stays whole for its blocks."""
        self._before = (first, self._past(first).copy())
        self._chunk = (first, rows)
        self.put(slice(None), first, rows)

    def put(self, planes: slice, first: int, rows: Bytes) -> None:
        """Write rows of positions [first, first + tokens)."""
        tokens = rows.shape[2]
        kept = min(tokens, self._ring) if self._ring else tokens
        slots = self._slots(first + tokens - kept, first + tokens)
        self._rows[planes, :, slots] = rows[:, :, tokens - kept :]
        self._end = first + tokens

    def restore(self, planes: slice, first: int, rows: Bytes) -> bool:
        """Write restored rows; False if they do not continue those that were restored before."""
        end = self._restored.get(planes.start, first if self._ring else 0)
        for plane in range(planes.start, planes.stop):
            self._restored[plane] = first + rows.shape[2]
        self.put(planes, first, rows)
        return first == end

    def fork(self, tokens: int, context_tokens: int) -> GroupCache:
        """Return a cache with the rows before ``tokens``."""
        found = GroupCache(self._group, self._window, context_tokens)
        rows = self._at(tokens).copy()
        found.put(slice(None), tokens - rows.shape[2], rows)
        found._before = (tokens, rows)
        return found

    def cut(self, tokens: int) -> None:
        """Keep what forks up to ``tokens`` need."""
        self._at(tokens)
        if self._before is not None:
            start, chunk = self._before[0], self._chunk[1]
            self._chunk = (start, chunk[:, :, : max(0, tokens - start)])
        self._end = tokens

    def seen(self, end: int) -> bytes:
        """Return what attention sees before position ``end``, in logical order."""
        return self._past(end).tobytes()

    def take(self, planes: slice, first: int, tokens: int) -> bytes:
        """Return the planes of a block of the last chunk, or of any block in a full group."""
        start, chunk = self._chunk
        if self._ring and start <= first and first + tokens <= start + chunk.shape[2]:
            return chunk[planes, :, first - start : first - start + tokens].tobytes()
        return self._rows[planes, :, self._slots(first, first + tokens)].tobytes()

    def _past(self, end: int) -> Bytes:
        found: Bytes = self._rows[
            :, :, self._slots(max(0, end - self._ring) * bool(self._ring), end)
        ]
        return found

    def _at(self, tokens: int) -> Bytes:
        if not self._ring:
            assert tokens <= self._end, f"found {self._end} rows, expected {tokens} for a fork"
            return self._rows[:, :, :tokens]
        if self._before is not None:
            (start, before), chunk = self._before, self._chunk[1]
            if tokens == start + chunk.shape[2]:
                rows = np.concatenate([before, chunk], axis=2)
                return rows[:, :, max(0, rows.shape[2] - self._ring) :]
            assert tokens == start, f"found a chunk from {start} on, expected rows to {tokens}"
            return before
        assert tokens == self._end, f"found {self._end} rows, expected {tokens} for a fork"
        return self._past(tokens)

    def _slots(self, first: int, end: int) -> Any:
        if not self._ring:
            return slice(first, end)
        if first // self._ring == (end - 1) // self._ring:
            return slice(first % self._ring, first % self._ring + end - first)
        return np.arange(first, end) % self._ring
