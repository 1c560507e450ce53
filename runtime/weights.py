"""Staged rows to device tensors.  Pinned thread only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from millpond.codecs.messages import Tensor
from millpond.runtime.errors import ModelUnreadable
from millpond.runtime.families.base import Dense, Packed
from millpond.runtime.kv.cache import Array

_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_VECTOR_DIMS = 1
_KEPT_IN_FLOAT32 = frozenset({"rope_freqs.weight"})


@dataclass(slots=True)
class _Open:
    """A tensor whose rows still come.

    parts  host arrays over all rows: the matrix, or packed words, scales and biases
    """

    tensor: Tensor
    parts: list[np.ndarray[Any, Any]]
    next_row: int = 0


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
            current = self._open = _Open(tensor, _host_parts(tensor))
        if tensor.name != current.tensor.name or tensor.first_row != current.next_row:
            raise ModelUnreadable(
                f"tensor {tensor.name!r}: found rows from {tensor.first_row} on, expected "
                f"{current.tensor.name!r} from {current.next_row}"
            )
        _copy_rows(current, tensor, payload)
        current.next_row += tensor.rows
        if current.next_row == _rows_of(tensor.shape):
            self._done[tensor.name] = self._to_device(current)
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

    def _to_device(self, built: _Open) -> Dense | Packed | Array:
        tensor = built.tensor
        arrays = [mx.array(part) for part in built.parts]
        built.parts.clear()
        if tensor.encoding not in _PLAIN:
            bits, group = _packing(tensor.encoding)
            lead = tensor.shape[:-1]
            shaped = [array.reshape(*lead, -1) for array in arrays]
            mx.eval(shaped)
            return Packed(shaped[0], shaped[1], shaped[2], bits, group)
        found = arrays[0].view(mx.bfloat16) if tensor.encoding == "bf16" else arrays[0]
        found = found.reshape(tensor.shape)
        if tensor.name not in _KEPT_IN_FLOAT32:
            found = found.astype(self._compute)
        mx.eval(found)
        return found if len(tensor.shape) == _VECTOR_DIMS else Dense(found)


def _rows_of(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _packing(encoding: str) -> tuple[int, int]:
    match = re.fullmatch(r"q(\d)g(\d+)", encoding)
    if match is None:
        raise ModelUnreadable(f"encoding: found {encoding!r}, expected f32, f16, bf16 or q<b>g<g>")
    return int(match[1]), int(match[2])


def _host_parts(tensor: Tensor) -> list[np.ndarray[Any, Any]]:
    rows, columns = _rows_of(tensor.shape), tensor.shape[-1]
    if tensor.encoding in _PLAIN:
        return [np.empty((rows, columns), dtype=_PLAIN[tensor.encoding])]
    bits, group = _packing(tensor.encoding)
    scales = np.dtype(_PLAIN[tensor.scale_dtype or "f32"])
    return [
        np.empty((rows, columns * bits // 32), dtype=np.uint32),
        np.empty((rows, columns // group), dtype=scales),
        np.empty((rows, columns // group), dtype=scales),
    ]


def _copy_rows(current: _Open, tensor: Tensor, payload: memoryview) -> None:
    start = 0
    for part in current.parts:
        size = tensor.rows * part.shape[1] * part.itemsize
        rows = np.frombuffer(payload[start : start + size], dtype=part.dtype)
        part[tensor.first_row : tensor.first_row + tensor.rows] = rows.reshape(tensor.rows, -1)
        start += size
    if start != len(payload):
        raise ModelUnreadable(
            f"tensor {tensor.name!r}: found {len(payload)} bytes of rows, expected {start}"
        )
