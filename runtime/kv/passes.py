"""What a forward pass does with live caches: adds its rows, keeps them for the layers that share.

Pinned thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from millpond.runtime.kv.cache import Array, LayerCache, Rows

Seen = Rows | tuple[Rows, ...]  # what attention sees: of one sequence, or of each
Position = int | Array  # of one sequence's first token, or (sequences,) of each


class Pass(Protocol):
    """How one forward pass uses the caches: it adds rows and keeps them for layers that share."""

    @property
    def sequences(self) -> int:
        """How many sequences the tokens of the pass belong to."""

    def add(self, layer: int, keys: Array, values: Array) -> Seen:
        """Add the rows of a layer that owns K and V; return what its queries attend to."""

    def shared(self, layer: int) -> Seen:
        """Return what ``add`` returned for that layer in this pass."""


class PrefillPass:
    """A pass over a chunk."""

    sequences = 1

    def __init__(self, caches: Mapping[int, LayerCache]) -> None:
        self._caches = caches
        self._rows: dict[int, Rows] = {}

    def add(self, layer: int, keys: Array, values: Array) -> Rows:
        self._rows[layer] = self._caches[layer].prefill(keys, values)
        return self._rows[layer]

    def shared(self, layer: int) -> Rows:
        return self._rows[layer]


class DecodePass(PrefillPass):
    """A pass over one token."""

    def add(self, layer: int, keys: Array, values: Array) -> Rows:
        self._rows[layer] = self._caches[layer].decode(keys, values)
        return self._rows[layer]


class BatchPass:
    """A pass over one token of each of several sequences."""

    def __init__(self, caches: Sequence[Mapping[int, LayerCache]]) -> None:
        self._caches = caches
        self._rows: dict[int, tuple[Rows, ...]] = {}
        self.sequences = len(caches)

    def add(self, layer: int, keys: Array, values: Array) -> tuple[Rows, ...]:
        self._rows[layer] = tuple(
            cache[layer].decode(keys[i : i + 1], values[i : i + 1])
            for i, cache in enumerate(self._caches)
        )
        return self._rows[layer]

    def shared(self, layer: int) -> tuple[Rows, ...]:
        return self._rows[layer]
