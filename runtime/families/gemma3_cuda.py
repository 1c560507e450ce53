"""Decode steps of Gemma 3 on CUDA: seven operations a layer instead of about thirty.

Formulas as in ``families.gemma3``.  Rows are written into the caches in place, so the arrays that
a step reads are the same ones from step to step.  Pinned thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from millpond.codecs.descriptors import LayerType
from millpond.runtime.families import cuda_kernels as kernels
from millpond.runtime.families.base import gelu_gated, soft_capped
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.cuda_kernels import AttentionShape, SequenceRows
from millpond.runtime.families.linear import Dense, embedding_rows
from millpond.runtime.kv.cache import Array

Rows = Sequence[Array]  # K and V of each layer in turn, then the counters; of one sequence
STEPS_KEPT = 64  # compiled steps: one for each count of sequences and capacities of their buffers


class Gemma3Decode:
    """One token of each of some sequences; made of the parts of a loaded ``Gemma3``.

    layers  with the attributes of ``gemma3._Layer``
    """

    def __init__(self, config: ModelConfig, layers: Sequence[Any], ends: tuple[Any, Any, Any]):
        """Take embedding table, output map and last norm as ``ends``."""
        self._config, self._layers = config, layers
        self._embedding, self._head, self._norm = ends
        self._shapes = [_shape(config, layer.config) for layer in layers]
        # mutable state, changed only in __call__
        self._step: Any = None
        self._seen: set[tuple[int, ...]] = set()

    def __call__(self, token_ids: Array, positions: Array, rows: Sequence[Rows]) -> Any:
        """Return float32 logits (sequences, V) and the best id of each, not evaluated.

        token_ids, positions  (sequences,), uint32 and int32
        """
        key = tuple(int(array.shape[-2]) for one in rows for array in one[:-1])
        if self._step is None or (key not in self._seen and len(self._seen) >= STEPS_KEPT):
            self._step = mx.compile(self._run)
            self._seen.clear()
        self._seen.add(key)
        return self._step(token_ids, positions, [list(one) for one in rows])

    def _run(self, token_ids: Array, positions: Array, rows: list[list[Array]]) -> Any:
        layers, eps = self._layers, self._config.norm_eps
        x = embedding_rows(self._embedding, token_ids, layers[0].attn_norm.dtype)
        x = x * mx.array(self._config.embedding_scale, dtype=x.dtype)
        normed = mx.fast.rms_norm(x, layers[0].attn_norm, eps)
        after = [*(layer.attn_norm for layer in layers[1:]), self._norm]
        for index, layer in enumerate(layers):
            held = [SequenceRows(one[2 * index], one[2 * index + 1], one[-1]) for one in rows]
            norms = (layer.q_norm, layer.k_norm)
            qkv = _mapped(layer.qkv, normed)
            seen = kernels.attend(self._shapes[index], qkv, norms, positions, held)
            weights = (layer.post_attention_norm, layer.ffn_norm)
            x, normed = kernels.add_norm(x, _mapped(layer.output, seen), weights, eps)
            inner = _mapped(layer.down, _gated(layer.gate_up, normed))
            x, normed = kernels.add_norm(x, inner, (layer.post_ffw_norm, after[index]), eps)
        logits = soft_capped(_mapped(self._head, normed), self._config.logit_softcap)
        return logits, mx.argmax(logits, axis=-1)


def is_served(config: ModelConfig) -> bool:
    """True if this device and this shape have the kernels."""
    if mx.default_device() == mx.cpu or not mx.cuda.is_available() or config.interleaved_rope:
        return False
    return all(
        _shape(config, layer).is_served
        and layer.rope_dims == layer.head_dim
        and not layer.use_rope_freqs
        and layer.kv_source == index
        for index, layer in enumerate(config.layers)
    )


def _shape(config: ModelConfig, layer: LayerConfig) -> AttentionShape:
    return AttentionShape(
        heads=config.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        window=config.sliding_window if layer.kind is LayerType.SLIDING else 0,
        scale=config.attention_scale,
        rope_base=layer.rope_base,
        rope_scale=layer.rope_scale,
        eps=config.norm_eps,
    )


def _mapped(linear: Any, x: Array) -> Array:
    if isinstance(linear, Dense) and kernels.is_served(x.shape[-1], x.dtype):
        return kernels.product(x, linear.weight)
    return linear(x)


def _gated(linear: Any, x: Array) -> Array:
    if isinstance(linear, Dense) and kernels.is_served(x.shape[-1], x.dtype):
        return kernels.gated_product(x, linear.weight)
    return gelu_gated(linear(x))
