"""``DirectModel``: a ``Model`` that shows the logits of every position; one thread, no actors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np
from millpond.runtime.families.base import Family
from millpond.runtime.kv.cache import LiveCaches, live_caches
from millpond.runtime.kv.passes import DecodePass, PrefillPass
from millpond.runtime.model import Model
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class DirectModel(Model):
    """A model whose forward pass can be called without steps."""

    def reading(self) -> Reading:
        """Return a new sequence over empty caches; the weights must have been loaded."""
        assert self._family is not None, "found no weights"
        return Reading(self._family, live_caches(self._layout, self._config.context_tokens))


class Reading:
    """One sequence: its live caches, and how many tokens they hold.

    The caller keeps to the grid, or does not: the logits are the same up to rounding.
    """

    def __init__(self, family: Family, caches: LiveCaches) -> None:
        self._family, self._caches = family, caches
        # mutable state, changed only in _forward
        self.length = 0

    def prefill(self, ids: Sequence[int], rows: Collection[int] | None = None) -> Logits:
        """Run a chunk; return the float32 logits at ``rows`` of it (None: all), (rows, V).

        Raises RowError after a decode: windows are rings then.
        """
        return self._forward(ids, PrefillPass(self._caches), rows)

    def decode(self, token_id: int) -> Logits:
        """Run one token; return its float32 logits, (V,)."""
        logits: Logits = self._forward([token_id], DecodePass(self._caches), None)[0]
        return logits

    def _forward(self, ids: Sequence[int], kv: PrefillPass, rows: Collection[int] | None) -> Logits:
        hidden = self._family.forward(mx.array(list(ids), dtype=mx.uint32), kv, self.length)
        self.length += len(ids)
        wanted = range(len(ids)) if rows is None else rows
        mx.eval(hidden, [array for cache in self._caches.values() for array in cache.arrays()])
        if not wanted:
            return np.empty((0, 0), np.float32)
        picked = hidden[mx.array(list(wanted), dtype=mx.uint32)]
        return np.array(self._family.logits(picked), dtype=np.float32)
