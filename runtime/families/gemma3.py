"""Gemma 3: pre- and post-norms around attention and MLP, q/k norm, sliding and full layers.

Formulas: Gemma 3 section of the project's facts file.  The file's norm weights are complete (the
converter added 1).  The embedding scale is sqrt(D), not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from millpond.runtime.families import cuda_kernels
from millpond.runtime.families.attention import Attention, heads, joined, rope
from millpond.runtime.families.base import InPlaceDecode, gelu_gated, soft_capped
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.gemma3_cuda import Gemma3Decode, is_served
from millpond.runtime.families.linear import Linear, Weights, embedding_rows, stacked
from millpond.runtime.kv.cache import Array
from millpond.runtime.kv.passes import Pass, Position


@dataclass(frozen=True, slots=True)
class _Layer:
    config: LayerConfig
    attn_norm: Array
    qkv: Linear
    q_norm: Array
    k_norm: Array
    output: Linear
    post_attention_norm: Array
    ffn_norm: Array
    gate_up: Linear
    down: Linear
    post_ffw_norm: Array


class Gemma3:
    """The whole model; see ``families.base.Family``."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: Any) -> None:
        self._config, self._dtype = config, dtype
        self._attend = Attention(config)
        self._embedding: Any = weights["token_embd.weight"]
        self._head: Any = weights.get("output.weight", self._embedding)
        self._norm = weights["output_norm.weight"]
        self._layers = [
            _layer(layer, f"blk.{index}.", weights) for index, layer in enumerate(config.layers)
        ]
        self.in_place: InPlaceDecode | None = None
        if is_served(config):
            ends = (self._embedding, self._head, self._norm)
            self.in_place = Gemma3Decode(config, self._layers, ends)

    def forward(self, token_ids: Array, kv: Pass, first: Position) -> Array:
        """See ``Family.forward``."""
        x = embedding_rows(self._embedding, token_ids, self._dtype)
        x = x * mx.array(self._config.embedding_scale, dtype=self._dtype)
        normed = self._norm_of(x, self._layers[0].attn_norm)
        after = [*(layer.attn_norm for layer in self._layers[1:]), self._norm]
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._heads(layer, normed, (kv.sequences, first))
            rows = kv.add(index, keys, values)
            seen = self._attend(queries, rows, layer.config, first)
            norms = (layer.post_attention_norm, layer.ffn_norm)
            x, normed = self._add_norm(x, layer.output(joined(seen)), norms)
            norms = (layer.post_ffw_norm, after[index])
            x, normed = self._add_norm(x, _mlp(layer, normed), norms)
        return normed

    def logits(self, hidden: Array) -> Array:
        """See ``Family.logits``."""
        return soft_capped(self._head(hidden), self._config.logit_softcap)

    def _add_norm(self, x: Array, y: Array, norms: tuple[Array, Array]) -> tuple[Array, Array]:
        """Return s = x + rms(y) · w₀ and rms(s) · w₁."""
        if self.in_place is not None:
            return cuda_kernels.add_norm(x, y, norms, self._config.norm_eps)
        x = x + self._norm_of(y, norms[0])
        return x, self._norm_of(x, norms[1])

    def _norm_of(self, x: Array, weight: Array) -> Array:
        return mx.fast.rms_norm(x, weight, self._config.norm_eps)

    def _heads(
        self, layer: _Layer, x: Array, where: tuple[int, Position]
    ) -> tuple[Array, Array, Array]:
        sequences, first = where
        config, dim, kv_heads = self._config, layer.config.head_dim, layer.config.kv_heads
        split = [config.heads * dim, (config.heads + kv_heads) * dim]
        q, k, v = mx.split(layer.qkv(x), split, axis=-1)
        queries = self._norm_of(heads(q, config.heads, dim, sequences), layer.q_norm)
        keys = self._norm_of(heads(k, kv_heads, dim, sequences), layer.k_norm)
        queries = rope(queries, layer.config, config, first, None)
        keys = rope(keys, layer.config, config, first, None)
        return queries, keys, heads(v, kv_heads, dim, sequences)


def _mlp(layer: _Layer, x: Array) -> Array:
    return layer.down(gelu_gated(layer.gate_up(x)))


def _layer(config: LayerConfig, prefix: str, weights: Weights) -> _Layer:
    def one(name: str) -> Any:
        return weights[f"{prefix}{name}.weight"]

    qkv = stacked(weights, [f"{prefix}attn_{name}.weight" for name in "qkv"])
    gate_up = stacked(weights, [f"{prefix}ffn_{name}.weight" for name in ("gate", "up")])
    return _Layer(
        config=config,
        attn_norm=one("attn_norm"),
        qkv=qkv,
        q_norm=one("attn_q_norm"),
        k_norm=one("attn_k_norm"),
        output=one("attn_output"),
        post_attention_norm=one("post_attention_norm"),
        ffn_norm=one("ffn_norm"),
        gate_up=gate_up,
        down=one("ffn_down"),
        post_ffw_norm=one("post_ffw_norm"),
    )
