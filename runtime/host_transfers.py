"""Bytes between the host and a device with memory of its own.  Pinned thread only.

One core copies slower than the bus moves: measured with 32 MB on an H200, ``mx.array`` needs 14 ms
and a copy by four threads into an array of MLX's CPU stream 5.5 ms; out of the device's memory one
thread needs 10 ms, four need 3.5.  The copying threads touch numpy only, and no copy here holds the
interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from millpond.runtime.host_memory import host_view

Array = Any  # mlx.core.array
PIECE_BYTES = 16 * 2**20  # of one transfer; planes that are larger go one by one
LANES = 4  # transfers under way: the host fills one while the device reads another
COPIERS_MAX = 4
_PART_BYTES = 2**20  # of a copy that one thread makes
_UNSIGNED = {2: mx.uint16, 4: mx.uint32}


class _Lane:
    """Host memory that the device reads, and what it was last read into."""

    def __init__(self) -> None:
        # mutable state, changed only here, in room and by Transfers
        self.array: Array | None = None
        self.view: Any = None
        self.moved: Array | None = None

    def room(self, elements: int, unit_bytes: int) -> tuple[Array, Any]:
        """Return room for the elements, which nothing reads any more, and the host's view of it.

        Raises what MLX raises.
        """
        moved, self.moved = self.moved, None
        if moved is not None:
            mx.eval(moved)
        array = self.array
        if array is None or array.itemsize != unit_bytes or array.size < elements:
            self.array = self.view = array = None
            size = max(elements, PIECE_BYTES // unit_bytes)
            array = mx.zeros((size,), dtype=_UNSIGNED[unit_bytes], stream=mx.cpu)
            mx.eval(array)
            self.array, self.view = array, host_view(array)
        return array[:elements], self.view[:elements]


class Transfers:
    """Copies between numpy arrays and a device's, on several cores."""

    def __init__(self) -> None:
        # mutable state, changed only in to_device, settle, copy and close
        self._lanes = [_Lane() for _ in range(LANES)]
        self._next = 0
        self._pool: ThreadPoolExecutor | None = None

    def to_device(self, rows: Any, dtype: Any) -> Array:
        """Return a device array of ``dtype`` with the bits of ``rows``, which may then change.

        rows   numpy, C-contiguous, of unsigned or float elements as wide as ``dtype``
        dtype  an MLX dtype of 2 or 4 bytes

        Its transfer has begun and is not waited for.  Raises what MLX raises, from this transfer
        or an earlier one.
        """
        lane = self._lanes[self._next]
        self._next = (self._next + 1) % LANES
        flat = rows.reshape(-1).view(f"u{rows.itemsize}")
        array, view = lane.room(flat.size, flat.itemsize)
        self.copy([(view, flat)])
        # a sum is a copy on the device; of unsigned numbers, as -0.0 + 0 would be 0.0
        lane.moved = moved = array + 0
        mx.async_eval(moved)  # type: ignore[no-untyped-call]
        return moved.view(dtype).reshape(rows.shape)

    def settle(self) -> None:
        """Forget what was moved, once it has been evaluated: its memory is its user's alone."""
        for lane in self._lanes:
            if lane.moved is not None:
                mx.eval(lane.moved)
                lane.moved = None

    def copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copy the second array of each pair into the first one, of the same shape and dtype."""
        parts = [part for target, source in pairs for part in _parts(target, source)]
        if len(parts) == 1:
            np.copyto(*parts[0])
            return
        if self._pool is None:
            workers = min(COPIERS_MAX, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="millpond-copy")
        for done in [self._pool.submit(np.copyto, *part) for part in parts]:
            done.result()

    def close(self) -> None:
        """Give threads and memory back."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._lanes = [_Lane() for _ in range(LANES)]


def _parts(target: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    """Cut a copy into parts for one thread each, if both arrays are contiguous."""
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        yield target, source
        return
    to, from_ = target.reshape(-1), source.reshape(-1)
    step = max(1, _PART_BYTES // target.itemsize)
    for start in range(0, to.size, step):
        yield to[start : start + step], from_[start : start + step]
