"""What every family shares: linear maps, norms, rotary embedding and attention over a cache.

Pinned thread only.  Shapes: hidden states (n, D); heads (1, heads, n, head_dim).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
from millpond.codecs.descriptors import LayerType
from millpond.runtime.families import host_kernels
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.host_kernels import attend_rows
from millpond.runtime.kv.cache import Array, Pass, Rows


class Linear(Protocol):
    """A bias-free linear map, weights (out, in)."""

    def __call__(self, x: Array) -> Array:
        """Return x · Wᵀ, (…, out)."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights as they are, (out, in)."""

    weight: Array

    def __call__(self, x: Array) -> Array:
        if x.shape[0] <= FEW_ROWS and _in_host_floats(x):
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


FEW_ROWS = 4  # tokens up to which a product is bound by reading the weights


def few_rows_product(x: Array, weight: Array) -> Array:
    """x · Wᵀ in small pieces of W, (n, in) and (out, in) → (n, out).

    A BLAS packs its operands before a large product, which for few rows of x takes longer than
    reading W once; its kernels for small matrices do not.
    """
    count, (width, inner) = x.shape[0], weight.shape
    rows = _piece_rows(width, min(PIECE_VALUES, PIECE_PRODUCTS // count) // inner)
    if rows in (0, width):
        return x @ weight.T
    whole = width // rows * rows
    pieces = weight[:whole].reshape(-1, rows, inner).swapaxes(1, 2)
    found = (x @ pieces).swapaxes(0, 1).reshape(count, whole)
    if whole == width:
        return found
    return mx.concatenate([found, x @ weight[whole:].T], axis=1)


PIECE_VALUES = 2**18  # weights in a piece: 1 MiB, half of a second-level cache
PIECE_PRODUCTS = 9 * 10**5  # OpenBLAS takes its small kernels below 100³ multiplications
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


def heads(x: Array, count: int, head_dim: int) -> Array:
    """(n, count · head_dim) → (1, count, n, head_dim)."""
    return x.reshape(1, -1, count, head_dim).transpose(0, 2, 1, 3)


def joined(x: Array) -> Array:
    """(1, count, n, head_dim) → (n, count · head_dim)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[2], -1)


def rope_divisors(config: ModelConfig, weights: Weights) -> Array | None:
    """Return base^(2j/dims) · ``rope_freqs`` per pair, float32, or None if no layer uses them.

    A divisor of 1e30 in the file means that the pair is not rotated.
    """
    users = [layer for layer in config.layers if layer.use_rope_freqs]
    if not users:
        return None
    exponents = mx.arange(0, users[0].rope_dims, 2, dtype=mx.float32) / users[0].rope_dims
    return mx.power(users[0].rope_base, exponents) * weights["rope_freqs.weight"]


def rope(
    x: Array, layer: LayerConfig, config: ModelConfig, offset: int, divisors: Array | None
) -> Array:
    """Rotate (1, heads, n, head_dim) at positions ``offset`` on.

    divisors  of ``rope_divisors``, for layers that use them
    """
    with_divisors = layer.use_rope_freqs
    return mx.fast.rope(
        x,
        layer.rope_dims,
        traditional=config.interleaved_rope,
        base=None if with_divisors else layer.rope_base,
        scale=layer.rope_scale,
        offset=offset,
        freqs=divisors if with_divisors else None,
    )


class Attention:
    """Softmax attention over cached rows; GQA by query head h // (H/K).

    A key at position k is visible to a query at p iff k <= p and, in sliding layers,
    p - k < window.  One way per device (G1): on a GPU MLX's fused kernel; on a CPU the query heads
    of a KV head are stacked, so that each score matrix is one product, several times faster than
    the kernel's fallback there.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._is_fused = mx.default_device() != mx.cpu
        # mutable state: the masks of the last pass; a chunk's layers share them
        self._masks: dict[tuple[int, ...], Array] = {}

    def __call__(self, queries: Array, rows: Rows, layer: LayerConfig, position: int) -> Array:
        """(1, heads, n, head_dim) at positions ``position`` on → the same shape."""
        keys, values = rows.keys.astype(queries.dtype), rows.values.astype(queries.dtype)
        count, scale = queries.shape[2], self._config.attention_scale
        mask = self._mask(count, rows, layer, position) if count > 1 else None
        if self._is_fused:
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask
            )
        kv_heads, dim = keys.shape[1], queries.shape[3]
        stacked_rows = (queries * scale).reshape(1, kv_heads, -1, dim)
        scores = stacked_rows @ keys.swapaxes(-1, -2)
        if mask is not None and scores.dtype == mx.float32:
            return attend_rows(scores, mask, values).reshape(queries.shape)
        if mask is not None:
            grouped = scores.reshape(1, kv_heads, -1, count, keys.shape[2])
            scores = (grouped + mask.astype(scores.dtype)).reshape(scores.shape)
        return (mx.softmax(scores, axis=-1) @ values).reshape(queries.shape)

    def _mask(self, count: int, rows: Rows, layer: LayerConfig, position: int) -> Array:
        """(n, keys), bool on a GPU and additive on a CPU."""
        used = rows.keys.shape[2]
        window = self._config.sliding_window if layer.kind is LayerType.SLIDING else 0
        wanted = (count, used, rows.first, position, window)
        mask = self._masks.get(wanted)
        if mask is None:
            query = mx.arange(position, position + count)[:, None]
            key = mx.arange(rows.first, rows.first + used)[None, :]
            visible = key <= query
            if window:
                visible = visible & (query - key < window)
            mask = visible if self._is_fused else mx.where(visible, 0.0, -mx.inf)
            if len(self._masks) >= MASKS_KEPT:
                self._masks.clear()
            self._masks[wanted] = mask
        return mask


MASKS_KEPT = 4  # a pass needs one per kind of layer


def gelu_tanh(x: Array) -> Array:
    """GELU in its tanh form: 0.5·x·(1 + tanh(sqrt(2/π)·(x + 0.044715·x³)))."""
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def gelu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gelu_tanh(gate) · up."""
    if _on_host(gate_up):
        return host_kernels.gelu_gated(gate_up)
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gelu_tanh(gate) * up


def silu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gate · sigmoid(gate) · up."""
    if _on_host(gate_up):
        return host_kernels.silu_gated(gate_up)
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up


def _on_host(x: Array) -> bool:
    """True for a chunk in float32 on a CPU: there numpy is faster; one token is not worth it."""
    return x.shape[0] > 1 and _in_host_floats(x)


def _in_host_floats(x: Array) -> bool:
    return bool(x.dtype == mx.float32 and mx.default_device() == mx.cpu)


def soft_capped(logits: Array, cap: float) -> Array:
    """Return float32 logits, c·tanh(x/c) if there is a cap c."""
    found = logits.astype(mx.float32)
    return mx.tanh(found / cap) * cap if cap else found


class Family(Protocol):
    """The forward pass of one architecture."""

    def forward(self, token_ids: Array, kv: Pass, first: int) -> Array:
        """Run tokens at positions ``first`` on, (n,) → hidden states before the head, (n, D)."""

    def logits(self, hidden: Array) -> Array:
        """(n, D) → float32 logits, (n, V)."""
