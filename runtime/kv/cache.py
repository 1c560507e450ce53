"""Live KV caches on the device: rows in, rows out, in an order that depends on position alone.

Invariants

(I1) Rows are head-major, (1, kv_heads, tokens, head_dim), and rounded to the KV dtype before any
     attention reads them.
(I2) What attention sees of a layer depends on positions and configuration alone: a full layer gets
     a slice of exactly the rows in use; a sliding layer gets, in prefill, the last ``window - 1``
     rows and the chunk in temporal order, and in decode a ring whose slot is ``position % window``.
(I3) A slot that was never written is zero, never uninitialised.

Pinned thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from millpond.runtime.host_memory import host_view
from millpond.runtime.kv.layout import KvLayout

Array = Any  # mlx.core.array; MLX ships no usable stubs for it
KEYS, VALUES = 0, 1  # which of the two an operation is about
FIRST_TOKENS = 1024  # a linear buffer begins with these and doubles: few copies, bounded waste


class RowError(Exception):
    """Rows that do not continue what the cache holds; the message gives found and expected."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values for one attention call.

    keys, values  (1, kv_heads, n, head_dim) in the KV dtype
    first         position of row 0, or -1 in a ring
    """

    keys: Array
    values: Array
    first: int


@dataclass(frozen=True, slots=True)
class RowShape:
    """What one token's K, and its V, of a layer look like."""

    kv_heads: int
    head_dim: int
    dtype: Any

    def zeros(self, tokens: int) -> Array:
        """Return empty rows, (1, kv_heads, tokens, head_dim)."""
        return mx.zeros((1, self.kv_heads, tokens, self.head_dim), dtype=self.dtype)


class LayerCache(Protocol):
    """The cache of one layer that owns K and V."""

    @property
    def length(self) -> int:
        """Tokens whose K and V are both in place."""

    def prefill(self, keys: Array, values: Array) -> Rows:
        """Add the rows of a chunk and return what its queries attend to."""

    def decode(self, keys: Array, values: Array) -> Rows:
        """Add the rows of one token and return what its query attends to."""

    def take(self, which: int, first: int, tokens: int) -> Array:
        """Return rows ``[first, first + tokens)``, (kv_heads, tokens, head_dim), not evaluated."""

    def put(self, which: int, first: int, rows: Array) -> None:
        """Add restored rows (kv_heads, tokens, head_dim) behind those that are there."""

    def put_host(self, which: int, first: int, rows: Any) -> None:
        """As ``put`` with rows in host memory, numpy; copied before it returns.

        Only where host and device share memory.  Nothing of this cache may be under way.
        """

    def fork(self, tokens: int, tokens_max: int) -> LayerCache:
        """Return a cache of its own with the rows before ``tokens``; raises RowError.

        tokens  see ``steps.Fork``
        """

    def cut(self, tokens: int) -> None:
        """Keep what forks need up to a boundary that a fork could have, in memory that fits."""

    def arrays(self) -> list[Array]:
        """Return the device arrays, for evaluation."""

    def in_place(self, tokens: int) -> tuple[Array, Array]:
        """Return K and V buffers for ``tokens`` tokens, which a kernel may write into.

        They are this cache's own, contiguous, (1, kv_heads, capacity, head_dim), not evaluated;
        the row of a token is at its position, in a window at ``position % window``.  Rows that a
        kernel wrote are read here, so nothing may be under way.
        """

    def advance(self) -> None:
        """Count one more token, whose row a kernel wrote."""


class LinearCache:
    """All rows of a full-attention layer in one buffer that grows; lengths of K and V apart.

    tokens_max  beyond this the buffer grows by what is asked for alone
    at_once     tokens that the first buffer has room for, at least
    """

    def __init__(self, shape: RowShape, tokens_max: int, at_once: int = 0) -> None:
        self._shape, self._tokens_max = shape, tokens_max
        self._first_tokens = max(FIRST_TOKENS, at_once)
        # mutable state, changed only in _write, cut, in_place and advance
        self._buffers: list[Array | None] = [None, None]
        self._lengths = [0, 0]
        self._is_open = False  # in place: a kernel may write

    @property
    def length(self) -> int:
        return min(self._lengths)

    def prefill(self, keys: Array, values: Array) -> Rows:
        self._write(KEYS, self._lengths[KEYS], keys.astype(self._shape.dtype))
        self._write(VALUES, self._lengths[VALUES], values.astype(self._shape.dtype))
        end = self._lengths[0]
        both = [buffer[:, :, :end, :] for buffer in self._buffers if buffer is not None]
        return Rows(both[0], both[1], 0)

    def decode(self, keys: Array, values: Array) -> Rows:
        return self.prefill(keys, values)

    def take(self, which: int, first: int, tokens: int) -> Array:
        buffer = self._buffers[which]
        if buffer is None or first < 0 or first + tokens > self._lengths[which]:
            end = self._lengths[which]
            raise RowError(f"found rows 0 to {end}, expected {first} to {first + tokens}")
        return buffer[0, :, first : first + tokens, :]

    def put(self, which: int, first: int, rows: Array) -> None:
        if first != self._lengths[which]:
            raise RowError(f"found rows from {first} on, expected {self._lengths[which]}")
        self._write(which, first, rows[None])

    def put_host(self, which: int, first: int, rows: Any) -> None:
        if first != self._lengths[which]:
            raise RowError(f"found rows from {first} on, expected {self._lengths[which]}")
        end = first + rows.shape[1]
        buffer = self._with_room(which, end)
        mx.eval(buffer)
        host_view(buffer)[0, :, first:end, :] = rows
        self._buffers[which], self._lengths[which], self._is_open = buffer, end, False

    def fork(self, tokens: int, tokens_max: int) -> LinearCache:
        found = LinearCache(self._shape, tokens_max)
        for which, buffer in enumerate(self._buffers):
            found._write(which, 0, _own(self._before(buffer, tokens)))
        return found

    def cut(self, tokens: int) -> None:
        for which, buffer in enumerate(self._buffers):
            self._buffers[which] = _own(self._before(buffer, tokens))
            self._lengths[which] = tokens
        self._is_open = False

    def in_place(self, tokens: int) -> tuple[Array, Array]:
        capacity = self._capacity(tokens)
        for which, buffer in enumerate(self._buffers):
            if buffer is None or self._lengths[which] >= tokens:
                raise RowError(f"found {self._lengths[which]} rows, expected fewer than {tokens}")
            if not self._is_open or buffer.shape[2] < tokens:
                held = buffer[:, :, : self._lengths[which], :]
                rest = self._shape.zeros(capacity - held.shape[2])
                self._buffers[which] = mx.concatenate([held, rest], axis=2)
        self._is_open = True
        return self._buffers[KEYS], self._buffers[VALUES]

    def advance(self) -> None:
        self._lengths = [length + 1 for length in self._lengths]

    def _capacity(self, tokens: int) -> int:
        """Few different ones, so that steps over them are compiled seldom."""
        wanted = FIRST_TOKENS
        while wanted < tokens:
            wanted = wanted * 3 // 2 if wanted.bit_count() == 1 else wanted * 4 // 3
        most = -(-self._tokens_max // FIRST_TOKENS) * FIRST_TOKENS
        return min(wanted, most) if most >= tokens else wanted

    def _before(self, buffer: Array | None, tokens: int) -> Array:
        if buffer is None or not 0 < tokens <= self.length:
            raise RowError(f"found {self.length} rows, expected at least {tokens}, and some")
        return buffer[:, :, :tokens, :]

    def arrays(self) -> list[Array]:
        return [buffer for buffer in self._buffers if buffer is not None]

    def _write(self, which: int, first: int, rows: Array) -> None:
        end = first + rows.shape[2]
        buffer = self._with_room(which, end)
        buffer[:, :, first:end, :] = rows
        self._buffers[which] = buffer
        self._lengths[which] = end
        self._is_open = False

    def _with_room(self, which: int, end: int) -> Array:
        buffer = self._buffers[which]
        capacity = 0 if buffer is None else buffer.shape[2]
        if buffer is not None and end <= capacity:
            return buffer
        wanted = min(max(2 * capacity, self._first_tokens), self._tokens_max)
        zeros = self._shape.zeros(max(end, wanted) - capacity)
        return zeros if buffer is None else mx.concatenate([buffer, zeros], axis=2)


class WindowCache:
    """The last rows of a sliding layer.

    While prompts are read the rows lie in temporal order: the window before the last chunk and the
    chunk itself, so that every block of the chunk can still be taken.  The first decode makes a
    ring of the last ``window`` of them; they stay beside it, for forks.
    """

    def __init__(self, shape: RowShape, window: int) -> None:
        self._shape, self._window = shape, window
        # mutable state, changed only in prefill, decode, put, cut, in_place and advance
        self._rows: list[Array | None] = [None, None]  # temporal order
        self._first = [0, 0]  # position of row 0
        self._ring: list[Array] = []
        self._length = 0  # once a ring
        self._is_open = False  # the ring is in place: a kernel may write

    @property
    def length(self) -> int:
        return self._length if self._ring else min(self._end(0), self._end(1))

    def prefill(self, keys: Array, values: Array) -> Rows:
        if self._ring:
            raise RowError("found a prefill, expected decode steps only after the first one")
        both = [
            self._extend(which, rows.astype(self._shape.dtype))
            for which, rows in ((KEYS, keys), (VALUES, values))
        ]
        return Rows(both[0], both[1], self._first[0])

    def decode(self, keys: Array, values: Array) -> Rows:
        if not self._ring:
            self._length = self.length
            self._ring = [self._to_ring(KEYS), self._to_ring(VALUES)]
            self._is_open = False
        slot, used = self._length % self._window, min(self._length + 1, self._window)
        for which, rows in ((KEYS, keys), (VALUES, values)):
            ring = self._ring[which]
            ring[:, :, slot : slot + 1, :] = rows.astype(self._shape.dtype)
            self._ring[which] = ring
        self._length += 1
        if used == self._window:
            return Rows(self._ring[0], self._ring[1], -1)
        return Rows(self._ring[0][:, :, :used, :], self._ring[1][:, :, :used, :], -1)

    def in_place(self, tokens: int) -> tuple[Array, Array]:
        if self.length >= tokens:
            raise RowError(f"found {self.length} rows, expected fewer than {tokens}")
        if not self._ring:
            self._length = self.length
            self._ring = [self._to_ring(KEYS), self._to_ring(VALUES)]
            self._is_open = False
        if not self._is_open:  # a ring that was filled at once is made of the chunk's own rows
            self._ring = [_own(ring) for ring in self._ring]
            self._is_open = True
        return self._ring[KEYS], self._ring[VALUES]

    def advance(self) -> None:
        self._length += 1

    def fork(self, tokens: int, tokens_max: int) -> WindowCache:
        found = WindowCache(self._shape, self._window)
        for which in (KEYS, VALUES):
            found._rows[which], found._first[which] = self._before(which, tokens)
        return found

    def cut(self, tokens: int) -> None:
        for which in (KEYS, VALUES):
            rows, first, end = self._rows[which], self._first[which], self._end(which)
            self._before(which, tokens)  # so that a later fork there is possible
            if rows is not None and tokens < end:
                self._rows[which] = _own(rows[:, :, : tokens - first, :])
        self._ring = []

    def _before(self, which: int, tokens: int) -> tuple[Array, int]:
        """Return the rows that a chunk at ``tokens`` needs, and the position of the first one.

        They are shared: no operation changes rows in temporal order in place.
        """
        rows, first, end = self._rows[which], self._first[which], self._end(which)
        start = max(0, tokens - (self._window - 1))
        if tokens == end and rows is not None and tokens:
            return rows, first
        if rows is None or not first <= start <= tokens <= end or not tokens:
            raise RowError(f"found rows {first} to {end}, expected {start} to {tokens}")
        return rows[:, :, start - first : tokens - first, :], start

    def take(self, which: int, first: int, tokens: int) -> Array:
        rows, start = self._rows[which], self._first[which]
        if self._ring or rows is None or first < start or first + tokens > self._end(which):
            end = self._end(which)
            raise RowError(f"found rows {start} to {end}, expected {first} to {first + tokens}")
        return rows[0, :, first - start : first - start + tokens, :]

    def put(self, which: int, first: int, rows: Array) -> None:
        found = self._rows[which]
        if self._ring or (found is not None and first != self._end(which)):
            raise RowError(f"found rows from {first} on, expected {self._end(which)}")
        if found is None:
            self._rows[which], self._first[which] = rows[None], first
        else:
            self._rows[which] = mx.concatenate([found, rows[None]], axis=2)

    def put_host(self, which: int, first: int, rows: Any) -> None:
        self.put(which, first, mx.array(rows).view(self._shape.dtype))

    def arrays(self) -> list[Array]:
        return list(self._ring) or [rows for rows in self._rows if rows is not None]

    def _end(self, which: int) -> int:
        rows = self._rows[which]
        return self._first[which] + (0 if rows is None else int(rows.shape[2]))

    def _extend(self, which: int, chunk: Array) -> Array:
        """Keep the last ``window - 1`` rows, add the chunk's (I2)."""
        rows, end = self._rows[which], self._end(which)
        keep = min(end, self._window - 1)
        if keep > end - self._first[which]:
            raise RowError(f"found rows {self._first[which]} to {end}, expected the last {keep}")
        if rows is not None and keep:
            chunk = mx.concatenate([rows[:, :, rows.shape[2] - keep :, :], chunk], axis=2)
        self._rows[which], self._first[which] = chunk, end - keep
        return chunk

    def _to_ring(self, which: int) -> Array:
        rows, end = self._rows[which], self._end(which)
        ring = self._shape.zeros(self._window)
        if rows is None:
            return ring
        # a chunk keeps window - 1 rows before it: a missing one is out of sight by the next token
        keep = min(end, self._window, int(rows.shape[2]))
        last = rows[:, :, rows.shape[2] - keep :, :]
        split = min(keep, self._window - (end - keep) % self._window)
        slot = (end - keep) % self._window
        ring[:, :, slot : slot + split, :] = last[:, :, :split, :]
        if split < keep:
            ring[:, :, : keep - split, :] = last[:, :, split:, :]
        return ring


def _own(rows: Array) -> Array:
    """Return a copy of the same bits, so that what the rows were a part of can go."""
    return mx.take(rows, mx.arange(rows.shape[2]), axis=2)


LiveCaches = dict[int, LayerCache]  # by layer, those that own K and V


def live_caches(layout: KvLayout, tokens_max: int, at_once: int = 0) -> LiveCaches:
    """Return empty caches for one sequence, which is not expected to pass ``tokens_max``.

    at_once  tokens that will be restored: their room is made in one piece
    """
    caches: LiveCaches = {}
    for group in layout.groups:
        shape = RowShape(group.kv_heads, group.head_dim, group.dtype.to_mlx_dtype())
        for layer in group.layers:
            if group.is_full:
                caches[layer] = LinearCache(shape, tokens_max, at_once)
            else:
                caches[layer] = WindowCache(shape, layout.sliding_window)
    return caches
