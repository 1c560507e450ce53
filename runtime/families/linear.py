"""Linear maps in the forms that weights are held in, and embedding tables.  Pinned thread only."""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
from millpond.runtime.kv.cache import Array


class Linear(Protocol):
    """A bias-free linear map, weights (out, in)."""

    def __call__(self, x: Array) -> Array:
        """Return x · Wᵀ, (…, out)."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights as they are, (out, in)."""

    weight: Array

    def __call__(self, x: Array) -> Array:
        if x.shape[0] <= FEW_ROWS and in_host_floats(x):
            return few_rows_product(x, self.weight)
        return x @ self.weight.T


@dataclass(frozen=True, slots=True)
class Packed:
    """MLX affine quantisation, re-laid from GGUF blocks without loss: w = scale · q + bias."""

    weight: Array
    scales: Array
    biases: Array
    bits: int
    group: int

    def __call__(self, x: Array) -> Array:
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group,
            bits=self.bits,
        )

    def rows(self, indexes: Array) -> Array:
        """Return the dequantised rows at the indexes, (n, in)."""
        return mx.dequantize(
            self.weight[indexes],
            self.scales[indexes],
            self.biases[indexes],
            group_size=self.group,
            bits=self.bits,
        )


FEW_ROWS = 8  # tokens up to which a product is bound by reading the weights


def few_rows_product(x: Array, weight: Array) -> Array:
    """x · Wᵀ in small pieces of W, (n, in) and (out, in) → (n, out).

    A BLAS packs its operands before a large product, which for few rows of x takes longer than
    reading W once; its kernels for small matrices do not.  The pieces do not depend on n.
    """
    count, (width, inner) = x.shape[0], weight.shape
    rows = _piece_rows(width, PIECE_VALUES // inner)
    if rows in (0, width):
        return x @ weight.T
    whole = width // rows * rows
    pieces = weight[:whole].reshape(-1, rows, inner).swapaxes(1, 2)
    found = _beside(x, pieces).swapaxes(0, 1).reshape(count, whole)
    if whole == width:
        return found
    return mx.concatenate([found, x @ weight[whole:].T], axis=1)


def _beside(x: Array, pieces: Array) -> Array:
    """x · each of the pieces, (pieces, n, rows), on as many cores as the size is worth.

    Reading weights from one core leaves half of the memory's bandwidth unused.  A piece is computed
    as it would be alone, so the result does not depend on the number of cores.
    """
    parts = min(_cores(), pieces.size // PART_VALUES, pieces.shape[0])
    if parts < 2:
        return x @ pieces
    ends = [pieces.shape[0] * part // parts for part in range(parts + 1)]
    found = [x @ pieces[: ends[1]]]
    for part, stream in enumerate(_STREAMS.upto(parts - 1), start=1):
        with mx.stream(stream):
            found.append(x @ pieces[ends[part] : ends[part + 1]])
    return mx.concatenate(found)


CORES_MAX = 4  # more gain nothing once the memory is the limit
PART_VALUES = 2**18  # 1 MiB of weights; handing less to another core costs more than it saves


class _Streams(threading.local):
    """A thread's further streams, made when first used; each has a thread that computes."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def upto(self, count: int) -> list[Any]:
        while len(self.made) < count:
            self.made.append(mx.new_stream(mx.cpu))
        return self.made[:count]


_STREAMS = _Streams()


@lru_cache
def _cores() -> int:
    """Return how many cores a product may use: those the process may, up to CORES_MAX."""
    allowed = getattr(os, "sched_getaffinity", None)
    return min(CORES_MAX, len(allowed(0)) if allowed else os.cpu_count() or 1)


PIECE_VALUES = 10**5  # OpenBLAS takes its small kernels below 100³ multiplications
FEWEST_ROWS = 16  # a piece with fewer is not worth its call


@lru_cache
def _piece_rows(width: int, most: int) -> int:
    """Rows of a piece: the largest divisor of ``width`` up to ``most``, or ``most``; 0: no pieces.

    The last is for widths without a fitting divisor, whose rest is a product of its own.
    """
    if most < FEWEST_ROWS:
        return 0
    fitting = [rows for rows in range(FEWEST_ROWS, most + 1) if width % rows == 0]
    return fitting[-1] if fitting else min(most, width)


Weights = MutableMapping[str, Any]  # Dense or Packed matrices, plain vectors


def stacked(weights: Weights, names: Sequence[str]) -> Linear:
    """Return one map whose outputs are those of the named ones in a row.

    The parts are taken out of ``weights`` and joined at once, so that a model never lies in memory
    twice.  Those held in different forms stay apart, as separate products.
    """
    parts = [weights.pop(name) for name in names]
    if len(parts) == 1:
        found: Linear = parts[0]
        return found
    if all(isinstance(part, Dense) for part in parts):
        whole = mx.concatenate([part.weight for part in parts], axis=0)
        mx.eval(whole)
        return Dense(whole)
    packed = [part for part in parts if isinstance(part, Packed)]
    if len(packed) == len(parts) and len({part.bits for part in packed}) == 1:
        columns = [
            mx.concatenate([getattr(part, name) for part in packed], axis=0)
            for name in ("weight", "scales", "biases")
        ]
        mx.eval(columns)
        return Packed(columns[0], columns[1], columns[2], packed[0].bits, packed[0].group)
    return _Beside(tuple(parts))


@dataclass(frozen=True, slots=True)
class _Beside:
    parts: tuple[Linear, ...]

    def __call__(self, x: Array) -> Array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)


def embedding_rows(table: Dense | Packed, indexes: Array, dtype: Any) -> Array:
    """Return rows of an embedding table, (n, D), in the compute dtype."""
    rows = table.weight[indexes] if isinstance(table, Dense) else table.rows(indexes)
    return rows.astype(dtype)


def in_host_floats(x: Array) -> bool:
    """True for float32 on a CPU, where some ways are faster than MLX's own."""
    return bool(x.dtype == mx.float32 and mx.default_device() == mx.cpu)
