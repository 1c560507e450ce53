"""Staged rows to device tensors.  Pinned thread only.

Where host and device share memory (a CPU, Metal), rows are written straight into the tensor that
the model keeps.  Elsewhere (CUDA) they go over in slices that are joined in the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from millpond.codecs.messages import Tensor
from millpond.runtime.errors import ModelUnreadable
from millpond.runtime.families.linear import Dense, Packed
from millpond.runtime.host_memory import SLICE_BYTES, host_view, is_shared
from millpond.runtime.kv.cache import Array

_STAGED: dict[str, Any] = {
    "u32": np.uint32,
    "f32": np.float32,
    "f16": np.uint16,
    "bf16": np.uint16,
}
_HELD: dict[str, Any] = {
    "u32": mx.uint32,
    "f32": mx.float32,
    "f16": mx.float16,
    "bf16": mx.bfloat16,
}
_PLAIN = ("f32", "f16", "bf16")
_KEPT_IN_FLOAT32 = frozenset({"rope_freqs.weight"})


class TensorBuilder:
    """Collects row ranges and makes one device tensor of each.

    A matrix becomes ``Dense`` or ``Packed``, a vector a plain array.  Dense values and vectors are
    held in the compute dtype, what positions are made of in float32.
    """

    def __init__(self, compute: Any) -> None:
        self._compute = compute
        # mutable state, changed only in add and finish
        self._open: _Open | None = None
        self._done: dict[str, Dense | Packed | Array] = {}

    def add(self, tensor: Tensor, payload: memoryview) -> None:
        """Copy rows; raises ModelUnreadable if they do not follow the ones before."""
        current = self._open
        if current is None:
            if tensor.name in self._done:
                raise ModelUnreadable(f"tensor {tensor.name!r}: found twice, expected once")
            current = self._open = self._opened(tensor)
        if _differs(current.tensor, tensor) or tensor.first_row != current.next_row:
            raise ModelUnreadable(
                f"tensor {tensor.name!r}: found rows from {tensor.first_row} on, expected "
                f"{current.tensor.name!r} from {current.next_row}"
            )
        _copy_rows(current, tensor, payload)
        current.next_row += tensor.rows
        if current.next_row == _rows_of(tensor.shape):
            self._done[tensor.name] = _finished(current)
            self._open = None

    def finish(self) -> dict[str, Dense | Packed | Array]:
        """Return every tensor; raises ModelUnreadable if one is not complete."""
        if self._open is not None:
            raise ModelUnreadable(
                f"tensor {self._open.tensor.name!r}: found {self._open.next_row} rows, "
                f"expected {_rows_of(self._open.tensor.shape)}"
            )
        done, self._done = self._done, {}
        return done

    def _opened(self, tensor: Tensor) -> _Open:
        rows, columns = _rows_of(tensor.shape), tensor.shape[-1]
        if tensor.encoding in _PLAIN:
            held = mx.float32 if tensor.name in _KEPT_IN_FLOAT32 else self._compute
            return _Open(tensor, [_Matrix(tensor.encoding, (rows, columns), held)])
        bits, group = _packing(tensor.encoding)
        scales = tensor.scale_dtype
        if scales not in _PLAIN:
            raise ModelUnreadable(f"scale_dtype: found {scales!r}, expected f32, f16 or bf16")
        words, groups = (rows, columns * bits // 32), (rows, columns // group)
        return _Open(
            tensor,
            [
                _Matrix("u32", words, mx.uint32),
                _Matrix(scales, groups, _HELD[scales]),
                _Matrix(scales, groups, _HELD[scales]),
            ],
        )


class _Matrix:
    """One device matrix: the values of a tensor, or its packed words, scales or biases.

    encoding  of the rows that come
    held      dtype on the device
    """

    def __init__(self, encoding: str, shape: tuple[int, int], held: Any) -> None:
        self.staged, self.columns = np.dtype(_STAGED[encoding]), shape[1]
        self._encoding, self._held = encoding, held
        # mutable state, changed only in write and take
        self._joined: list[Array] = []
        self._whole: Array | None = None
        self._view: Any = None
        if is_shared():
            self._whole = mx.zeros(shape, dtype=held)
            mx.eval(self._whole)
            self._view = host_view(self._whole)

    @property
    def row_bytes(self) -> int:
        """Bytes of a staged row."""
        return self.columns * int(self.staged.itemsize)

    def write(self, first: int, rows: Any) -> None:
        """Add staged rows (n, columns), which follow those that are there."""
        if self._view is not None and self._held == _HELD[self._encoding]:
            np.copyto(self._view[first : first + len(rows)], rows)
            return
        step = max(1, SLICE_BYTES // self.row_bytes)
        for start in range(first, first + len(rows), step):
            found = mx.array(rows[start - first : start - first + step])
            found = found.view(_HELD[self._encoding]).astype(self._held)
            mx.eval(found)
            if self._view is None:
                self._joined.append(found)
            else:
                np.copyto(self._view[start : start + found.shape[0]], host_view(found))

    def take(self, shape: tuple[int, ...]) -> Array:
        """Return the whole in another shape; nothing is written after that."""
        whole = mx.concatenate(self._joined, axis=0) if self._whole is None else self._whole
        found = whole.reshape(shape)
        mx.eval(found)
        self._joined.clear()
        self._whole = self._view = None
        return found


@dataclass(slots=True)
class _Open:
    """A tensor whose rows still come.

    parts  the matrix, or packed words, scales and biases
    """

    tensor: Tensor
    parts: list[_Matrix]
    next_row: int = 0


def _finished(built: _Open) -> Dense | Packed | Array:
    shape = built.tensor.shape
    if len(built.parts) > 1:
        words, scales, biases = (part.take((*shape[:-1], part.columns)) for part in built.parts)
        return Packed(words, scales, biases, *_packing(built.tensor.encoding))
    found = built.parts[0].take(shape)
    return found if len(shape) == 1 else Dense(found)


def _copy_rows(current: _Open, tensor: Tensor, payload: memoryview) -> None:
    if tensor.first_row + tensor.rows > _rows_of(tensor.shape):
        raise ModelUnreadable(
            f"tensor {tensor.name!r}: found rows to {tensor.first_row + tensor.rows}, "
            f"expected {_rows_of(tensor.shape)}"
        )
    expected = tensor.rows * sum(part.row_bytes for part in current.parts)
    if expected != len(payload):
        raise ModelUnreadable(
            f"tensor {tensor.name!r}: found {len(payload)} bytes of rows, expected {expected}"
        )
    for part, piece in zip(current.parts, _pieces(current, tensor.rows, payload), strict=True):
        rows = np.frombuffer(piece, dtype=part.staged).reshape(tensor.rows, part.columns)
        part.write(tensor.first_row, rows)


def _pieces(current: _Open, rows: int, payload: memoryview) -> Iterator[memoryview]:
    start = 0
    for part in current.parts:
        size = rows * part.row_bytes
        yield payload[start : start + size]
        start += size


def _differs(one: Tensor, other: Tensor) -> bool:
    return (one.name, one.shape, one.encoding, one.scale_dtype) != (
        other.name,
        other.shape,
        other.encoding,
        other.scale_dtype,
    )


def _rows_of(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _packing(encoding: str) -> tuple[int, int]:
    match = re.fullmatch(r"q(\d)g(\d+)", encoding)
    if match is None:
        raise ModelUnreadable(f"encoding: found {encoding!r}, expected f32, f16, bf16 or q<b>g<g>")
    return int(match[1]), int(match[2])
