"""Softmax and gated activations on the CPU by numpy, in place on evaluated MLX arrays.

MLX's CPU build on Linux computes exp and tanh one element at a time, about 25 ns each; numpy has
vector code for them, more than ten times faster, and releases the interpreter lock.  Rows are taken
in slices that fit the second-level cache.

Pinned thread only.  The arrays are float32, row-contiguous and used by no other graph.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from millpond.runtime.kv.cache import Array

SLICE_VALUES = 2**16  # 256 KiB of float32
_TANH_SCALE, _TANH_CUBE = np.float32(0.7978845608028654), np.float32(0.044715)


def attend_rows(scores: Array, mask: Array, values: Array) -> Array:
    """softmax(scores + mask) · values.

    scores  (1, kv_heads, groups · n, keys); overwritten
    mask    (n, keys), additive
    values  (1, kv_heads, keys, head_dim)

    The division by the row sums comes after the product: it is over head_dim then, not over keys.
    """
    mx.eval(scores, mask)
    count, keys = mask.shape
    view: Any = np.array(scores, copy=False).reshape(-1, count, keys)
    added: Any = np.array(mask, copy=False)
    sums = np.empty((view.shape[0], count, 1), dtype=np.float32)
    step = max(1, SLICE_VALUES // keys)
    for head, rows in enumerate(view):
        for first in range(0, count, step):
            part = rows[first : first + step]
            part += added[first : first + step]
            part -= part.max(axis=-1, keepdims=True)
            np.exp(part, out=part)
            part.sum(axis=-1, keepdims=True, out=sums[head, first : first + step])
    shape = (*scores.shape[:3], 1)
    return (scores @ values) / mx.array(sums.reshape(shape))


def gelu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gelu_tanh(gate) · up; overwrites the gate."""
    return _gated(gate_up, _gelu_tanh)


def silu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gate · sigmoid(gate) · up; overwrites the gate."""
    return _gated(gate_up, _silu)


def _gated(gate_up: Array, activate: Any) -> Array:
    mx.eval(gate_up)
    rows: Any = np.array(gate_up, copy=False)
    width = rows.shape[1] // 2
    step = max(1, SLICE_VALUES // rows.shape[1])
    scratch = np.empty((step, width), dtype=np.float32)
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        gate, up = part[:, :width], part[:, width:]
        gate *= activate(gate, scratch[: part.shape[0]])
        gate *= up
    return gate_up[:, :width]


def _gelu_tanh(gate: Any, scratch: Any) -> Any:
    """0.5 · (1 + tanh(sqrt(2/π)·(x + 0.044715·x³))), in ``scratch``."""
    np.multiply(gate, gate, out=scratch)
    scratch *= _TANH_CUBE
    scratch += np.float32(1)
    scratch *= gate
    scratch *= _TANH_SCALE
    np.tanh(scratch, out=scratch)
    scratch += np.float32(1)
    scratch *= np.float32(0.5)
    return scratch


def _silu(gate: Any, scratch: Any) -> Any:
    """sigmoid(x) as 0.5 · (1 + tanh(x/2)), in ``scratch``: never overflows."""
    np.multiply(gate, np.float32(0.5), out=scratch)
    np.tanh(scratch, out=scratch)
    scratch += np.float32(1)
    scratch *= np.float32(0.5)
    return scratch
