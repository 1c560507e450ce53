"""Heads, rotary embedding and attention over cached rows.  Pinned thread only.

Heads are (sequences, heads, n, head_dim): one sequence with n tokens, or many with one token each.
"""

from __future__ import annotations

import mlx.core as mx
from millpond.codecs.descriptors import LayerType
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.host_kernels import attend_rows
from millpond.runtime.families.linear import Weights
from millpond.runtime.kv.cache import Array, Rows
from millpond.runtime.kv.passes import Position, Seen


def heads(x: Array, count: int, head_dim: int, sequences: int = 1) -> Array:
    """(n, count · head_dim) → (sequences, count, n / sequences, head_dim)."""
    return x.reshape(sequences, -1, count, head_dim).transpose(0, 2, 1, 3)


def joined(x: Array) -> Array:
    """Undo ``heads``."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1] * x.shape[3])


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
    x: Array, layer: LayerConfig, config: ModelConfig, first: Position, divisors: Array | None
) -> Array:
    """Rotate (sequences, heads, n, head_dim) at positions ``first`` on.

    divisors  of ``rope_divisors``, for layers that use them
    """
    with_divisors = layer.use_rope_freqs
    return mx.fast.rope(
        x,
        layer.rope_dims,
        traditional=config.interleaved_rope,
        base=None if with_divisors else layer.rope_base,
        scale=layer.rope_scale,
        offset=first,
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

    def __call__(self, queries: Array, seen: Seen, layer: LayerConfig, first: Position) -> Array:
        """(sequences, heads, n, head_dim) at positions ``first`` on → the same shape."""
        if isinstance(seen, Rows):
            return self._one(queries, seen, layer, first)
        found = [self._one(queries[i : i + 1], rows, layer, 0) for i, rows in enumerate(seen)]
        return mx.concatenate(found, axis=0)

    def _one(self, queries: Array, rows: Rows, layer: LayerConfig, first: Position) -> Array:
        keys, values = rows.keys.astype(queries.dtype), rows.values.astype(queries.dtype)
        count, scale = queries.shape[2], self._config.attention_scale
        if self._is_fused and count > 1 and self._is_causal(rows, layer):
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask="causal"
            )
        mask = self._mask(count, rows, layer, first) if count > 1 else None
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

    def _is_causal(self, rows: Rows, layer: LayerConfig) -> bool:
        """True if no query of a chunk, whose rows are the last ones, misses an earlier key."""
        within = rows.keys.shape[2] <= self._config.sliding_window
        return layer.kind is LayerType.FULL or within

    def _mask(self, count: int, rows: Rows, layer: LayerConfig, first: Position) -> Array:
        """(n, keys), bool on a GPU and additive on a CPU."""
        used = rows.keys.shape[2]
        window = self._config.sliding_window if layer.kind is LayerType.SLIDING else 0
        wanted = (count, used, rows.first, first, window)
        mask = self._masks.get(wanted)
        if mask is None:
            query = mx.arange(first, first + count)[:, None]
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
