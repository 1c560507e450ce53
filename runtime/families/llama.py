"""Plain Llama (Llama, Mistral, SmolLM2): pre-norms, full attention, SwiGLU.

Formulas: Touvron et al. 2023 (arXiv 2302.13971); names and layout as llama.cpp's ``llama`` files,
whose q and k rows are permuted for interleaved pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from millpond.runtime.families.attention import Attention, heads, joined, rope, rope_divisors
from millpond.runtime.families.base import InPlaceDecode, silu_gated, soft_capped
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.linear import Linear, Weights, embedding_rows, stacked
from millpond.runtime.kv.cache import Array
from millpond.runtime.kv.passes import Pass, Position


@dataclass(frozen=True, slots=True)
class _Layer:
    config: LayerConfig
    attn_norm: Array
    qkv: Linear
    output: Linear
    ffn_norm: Array
    gate_up: Linear
    down: Linear


class Llama:
    """The whole model; see ``families.base.Family``."""

    in_place: InPlaceDecode | None = None

    def __init__(self, config: ModelConfig, weights: Weights, dtype: Any) -> None:
        self._config, self._dtype = config, dtype
        self._attend = Attention(config)
        self._embedding: Any = weights["token_embd.weight"]
        self._head: Any = weights.get("output.weight", self._embedding)
        self._norm = weights["output_norm.weight"]
        self._divisors = rope_divisors(config, weights)
        self._layers = [
            _layer(layer, f"blk.{index}.", weights) for index, layer in enumerate(config.layers)
        ]

    def forward(self, token_ids: Array, kv: Pass, first: Position) -> Array:
        """See ``Family.forward``."""
        x = embedding_rows(self._embedding, token_ids, self._dtype)
        for index, layer in enumerate(self._layers):
            normed = self._normed(x, layer.attn_norm)
            queries, keys, values = self._heads(layer, normed, (kv.sequences, first))
            rows = kv.add(index, keys, values)
            seen = self._attend(queries, rows, layer.config, first)
            x = x + layer.output(joined(seen))
            x = x + layer.down(silu_gated(layer.gate_up(self._normed(x, layer.ffn_norm))))
        return self._normed(x, self._norm)

    def logits(self, hidden: Array) -> Array:
        """See ``Family.logits``."""
        return soft_capped(self._head(hidden), self._config.logit_softcap)

    def _normed(self, x: Array, weight: Any) -> Array:
        return mx.fast.rms_norm(x, weight, self._config.norm_eps)

    def _heads(
        self, layer: _Layer, x: Array, where: tuple[int, Position]
    ) -> tuple[Array, Array, Array]:
        sequences, first = where
        config, dim, kv_heads = self._config, layer.config.head_dim, layer.config.kv_heads
        cuts = [config.heads * dim, (config.heads + kv_heads) * dim]
        q, k, v = mx.split(layer.qkv(x), cuts, axis=-1)
        queries = rope(
            heads(q, config.heads, dim, sequences), layer.config, config, first, self._divisors
        )
        keys = rope(heads(k, kv_heads, dim, sequences), layer.config, config, first, self._divisors)
        return queries, keys, heads(v, kv_heads, dim, sequences)


def _layer(config: LayerConfig, prefix: str, weights: Weights) -> _Layer:
    def one(name: str) -> Any:
        return weights[f"{prefix}{name}.weight"]

    return _Layer(
        config=config,
        attn_norm=one("attn_norm"),
        qkv=stacked(weights, [f"{prefix}attn_{name}.weight" for name in "qkv"]),
        output=one("attn_output"),
        ffn_norm=one("ffn_norm"),
        gate_up=stacked(weights, [f"{prefix}ffn_{name}.weight" for name in ("gate", "up")]),
        down=one("ffn_down"),
    )
