"""Decode steps by kernels that write rows in place, the next one begun before it is asked for.

While a step's tokens travel to the engine and back, the device would be idle; so the step that
follows is begun on the tokens just chosen.  If something else is asked for, what it found is
dropped; the rows it wrote lie behind the end, or took the place of one that has left the window,
and are written again.

Pinned thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from millpond.runtime.families.base import InPlaceDecode
from millpond.runtime.kv.cache import Array, LinearCache, LiveCaches
from millpond.runtime.steps import DecodeToken

Ready = Sequence[tuple[DecodeToken, LiveCaches]]
TOGETHER = 8  # sequences of one step: what the kernels keep in registers


@dataclass(slots=True)
class _Opened:
    """A sequence's buffers, and how many tokens they have room for."""

    rows: list[Array]
    room: int


@dataclass(slots=True)
class _Ahead:
    """A step under way that nobody asked for yet.

    fed  position and token id of each sequence
    """

    fed: tuple[tuple[int, int], ...]
    logits: Array
    best: Array


class InPlaceSteps:
    """The buffers of the sequences that decode, and the steps begun ahead."""

    def __init__(self, decode: InPlaceDecode) -> None:
        self._decode = decode
        # mutable state, changed only in the methods
        self._opened: dict[int, _Opened] = {}
        self._ahead: dict[tuple[int, ...], _Ahead] = {}

    def run(self, ready: Ready) -> tuple[Array, Array]:
        """Return logits (sequences, V) and the best id of each, under way; counts the tokens."""
        ahead = self._ahead.pop(_names(ready), None)
        fed = tuple((token.position, token.token_id) for token, _ in ready)
        if ahead is not None and ahead.fed == fed:
            found = ahead.logits, ahead.best
        else:
            ids = mx.array([token.token_id for token, _ in ready], dtype=mx.uint32)
            found = self._begun(ready, ids, [token.position for token, _ in ready])
        for _, caches in ready:
            for cache in caches.values():
                cache.advance()
        return found

    def chosen(self, ready: Ready, best: Array) -> list[int]:
        """Return the best ids once they are known; begins the step that follows on them."""
        positions = [token.position + 1 for token, _ in ready]
        logits, after = self._begun(ready, best.astype(mx.uint32), positions)
        ids: list[int] = best.tolist()
        self._ahead[_names(ready)] = _Ahead(tuple(zip(positions, ids, strict=True)), logits, after)
        return ids

    def forget(self, sequence_id: int) -> None:
        """Drop what belongs to a sequence, because it ended or its caches changed."""
        self._opened.pop(sequence_id, None)
        for names in [names for names in self._ahead if sequence_id in names]:
            del self._ahead[names]

    def clear(self) -> None:
        """Drop everything."""
        self._opened.clear()
        self._ahead.clear()

    def _begun(self, ready: Ready, ids: Array, positions: list[int]) -> tuple[Array, Array]:
        rows = [
            self._rows(token.sequence_id, caches, position + 1)
            for (token, caches), position in zip(ready, positions, strict=True)
        ]
        found = self._decode(ids, mx.array(positions, dtype=mx.int32), rows)
        mx.async_eval(found)  # type: ignore[no-untyped-call]
        return found

    def _rows(self, sequence_id: int, caches: LiveCaches, tokens: int) -> list[Array]:
        opened = self._opened.get(sequence_id)
        if opened is not None and tokens <= opened.room:
            return opened.rows
        mx.synchronize()  # rows written in place are read, and MLX does not know who wrote them
        layers = [caches[layer] for layer in sorted(caches)]
        pairs = [layer.in_place(tokens) for layer in layers]
        most = max(int(keys.shape[1]) for keys, _ in pairs)
        rows = [array for pair in pairs for array in pair]
        rows.append(mx.zeros((most,), dtype=mx.int32))
        mx.eval(rows)
        capacities = [
            int(keys.shape[2])
            for layer, (keys, _) in zip(layers, pairs, strict=True)
            if isinstance(layer, LinearCache)
        ]
        self._opened[sequence_id] = _Opened(rows, min(capacities, default=2**62))
        return rows


def _names(ready: Ready) -> tuple[int, ...]:
    return tuple(token.sequence_id for token, _ in ready)
