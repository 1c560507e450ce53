"""What every family shares: linear maps, norms, rotary embedding and attention over a cache.

Pinned thread only.  Shapes: hidden states (n, D); heads (1, heads, n, head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from millpond.codecs.descriptors import LayerType
from millpond.runtime.families.config import LayerConfig, ModelConfig
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


Weights = Mapping[str, Any]  # Dense or Packed matrices, plain vectors


def stacked(weights: Weights, names: Sequence[str]) -> Linear:
    """Return one map whose outputs are those of the named ones in a row.

    Falls back to separate products if the parts are held in different forms.
    """
    parts = [weights[name] for name in names]
    if all(isinstance(part, Dense) for part in parts):
        return Dense(mx.concatenate([part.weight for part in parts], axis=0))
    packed = [part for part in parts if isinstance(part, Packed)]
    if len(packed) == len(parts) and len({part.bits for part in packed}) == 1:
        columns = [
            mx.concatenate([getattr(part, name) for part in packed], axis=0)
            for name in ("weight", "scales", "biases")
        ]
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


def attend(
    queries: Array, rows: Rows, layer: LayerConfig, config: ModelConfig, position: int
) -> Array:
    """Softmax attention of queries at positions ``position`` on; GQA by head h // (H/K).

    A key at position k is visible to a query at p iff k <= p and, in sliding layers,
    p - k < window.
    """
    count = queries.shape[2]
    keys, values = rows.keys.astype(queries.dtype), rows.values.astype(queries.dtype)
    mask: Any = None
    if count > 1 or rows.first >= 0:
        mask = _mask(count, rows, layer, config, position)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=config.attention_scale, mask=mask
    )


def _mask(count: int, rows: Rows, layer: LayerConfig, config: ModelConfig, position: int) -> Any:
    used = rows.keys.shape[2]
    if layer.kind is LayerType.FULL or used <= config.sliding_window:
        return "causal" if count > 1 else None
    query = mx.arange(position, position + count)[:, None]
    key = mx.arange(rows.first, rows.first + used)[None, :]
    return (key <= query) & (query - key < config.sliding_window)


def gelu_tanh(x: Array) -> Array:
    """GELU in its tanh form: 0.5·x·(1 + tanh(sqrt(2/π)·(x + 0.044715·x³)))."""
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


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
