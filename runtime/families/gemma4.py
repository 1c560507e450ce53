"""Gemma 4: dense, with per-layer embeddings and shared KV (E2B, E4B), or with experts (26B-A4B).

Formulas: Gemma 4 section of the project's facts file.  What differs from Gemma 3: the scale is 1;
V is RMS-normed without a weight; a layer without ``attn_v`` makes V of the raw K projection; the
residual stream is scaled at the end of each layer; logits are soft-capped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from millpond.runtime.families.attention import Attention, heads, joined, rope, rope_divisors
from millpond.runtime.families.base import InPlaceDecode, gelu_gated, gelu_tanh, soft_capped
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.experts import Experts, load_experts
from millpond.runtime.families.linear import Linear, Weights, embedding_rows, stacked
from millpond.runtime.kv.cache import Array
from millpond.runtime.kv.passes import Pass, Position, Seen


@dataclass(frozen=True, slots=True)
class _PerLayer:
    """The layer's part of the per-layer embeddings."""

    gate: Linear
    project: Linear
    norm: Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer; ``projections`` is q, k, v; q, k (V = K); or q alone (shared KV)."""

    config: LayerConfig
    projections: Linear
    parts: int
    weights: dict[str, Any]
    gate_up: Linear
    per_layer: _PerLayer | None
    experts: Experts | None

    def __getitem__(self, name: str) -> Any:
        return self.weights[name]


class Gemma4:
    """The whole model; see ``families.base.Family``."""

    in_place: InPlaceDecode | None = None

    def __init__(self, config: ModelConfig, weights: Weights, dtype: Any) -> None:
        self._config, self._dtype, self._weights = config, dtype, weights
        self._attend = Attention(config)
        self._embedding: Any = weights["token_embd.weight"]
        self._head: Any = weights.get("output.weight", self._embedding)
        self._divisors = rope_divisors(config, weights)
        self._layers = [_layer(config, index, weights) for index in range(len(config.layers))]

    def forward(self, token_ids: Array, kv: Pass, first: Position) -> Array:
        """See ``Family.forward``."""
        x = embedding_rows(self._embedding, token_ids, self._dtype)
        x = x * mx.array(self._config.embedding_scale, dtype=self._dtype)
        inputs = self._per_layer_inputs(token_ids, x) if self._config.per_layer_input else None
        for index, layer in enumerate(self._layers):
            normed = self._norm(x, layer["attn_norm"])
            seen = self._attention(index, layer, normed, (kv, first))
            x = x + self._norm(layer["attn_output"](seen), layer["post_attention_norm"])
            x = x + self._norm(self._feed_forward(layer, x), layer["post_ffw_norm"])
            if layer.per_layer is not None and inputs is not None:
                part = layer.per_layer
                gated = gelu_tanh(part.gate(x)) * inputs[:, index, :]
                x = x + self._norm(part.project(gated), part.norm)
            x = x * layer["layer_output_scale"]
        return self._norm(x, self._weights["output_norm.weight"])

    def logits(self, hidden: Array) -> Array:
        """See ``Family.logits``."""
        return soft_capped(self._head(hidden), self._config.logit_softcap)

    def _norm(self, x: Array, weight: Any) -> Array:
        return mx.fast.rms_norm(x, weight, self._config.norm_eps)

    def _attention(
        self, index: int, layer: _Layer, x: Array, where: tuple[Pass, Position]
    ) -> Array:
        kv, first = where
        shape, config = layer.config, self._config
        width, kv_width = config.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cuts = [width, width + kv_width][: layer.parts - 1]
        projected = layer.projections(x)
        found: list[Array] = list(mx.split(projected, cuts, axis=-1)) if cuts else [projected]
        queries = self._norm(
            heads(found[0], config.heads, shape.head_dim, kv.sequences), layer["attn_q_norm"]
        )
        queries = rope(queries, shape, config, first, self._divisors)
        rows = (
            kv.shared(shape.kv_source)
            if layer.parts == 1
            else self._rows(index, layer, found[1:], where)
        )
        return joined(self._attend(queries, rows, shape, first))

    def _rows(
        self, index: int, layer: _Layer, found: list[Array], where: tuple[Pass, Position]
    ) -> Seen:
        kv, first = where
        shape = layer.config
        raw = heads(found[0], shape.kv_heads, shape.head_dim, kv.sequences)
        keys = rope(
            self._norm(raw, layer["attn_k_norm"]), shape, self._config, first, self._divisors
        )
        values = (
            raw
            if len(found) == 1
            else heads(found[1], shape.kv_heads, shape.head_dim, kv.sequences)
        )
        return kv.add(index, keys, self._norm(values, None))

    def _feed_forward(self, layer: _Layer, x: Array) -> Array:
        normed = self._norm(x, layer["ffn_norm"])
        dense = layer["ffn_down"](gelu_gated(layer.gate_up(normed)))
        if layer.experts is None:
            return dense
        mixed = layer.experts.mix(
            self._norm(x, None), self._norm(x, layer["pre_ffw_norm_2"]), self._config
        )
        return self._norm(dense, layer["post_ffw_norm_1"]) + self._norm(
            mixed, layer["post_ffw_norm_2"]
        )

    def _per_layer_inputs(self, token_ids: Array, x: Array) -> Array:
        """(n, layers, P): what each layer adds of the token and of its embedding."""
        size, count = self._config.per_layer_input, len(self._layers)
        table: Any = self._weights["per_layer_token_embd.weight"]
        project: Any = self._weights["per_layer_model_proj.weight"]
        of_token = embedding_rows(table, token_ids, self._dtype) * size**0.5
        of_model = (project(x) * self._config.hidden**-0.5).reshape(-1, count, size)
        of_model = self._norm(of_model, self._weights["per_layer_proj_norm.weight"])
        return (of_model + of_token.reshape(-1, count, size)) * 2**-0.5


def _layer(config: ModelConfig, index: int, weights: Weights) -> _Layer:
    prefix, shape = f"blk.{index}.", config.layers[index]
    parts = ["q"]
    if shape.kv_source == index:
        parts += ["k", "v"] if f"{prefix}attn_v.weight" in weights else ["k"]
    projections = stacked(weights, [f"{prefix}attn_{part}.weight" for part in parts])
    gate_up = stacked(weights, [f"{prefix}ffn_{name}.weight" for name in ("gate", "up")])
    own = {
        name.removeprefix(prefix).removesuffix(".weight"): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    per_layer = (
        _PerLayer(own["inp_gate"], own["proj"], own["post_norm"])
        if config.per_layer_input
        else None
    )
    return _Layer(
        config=shape,
        projections=projections,
        parts=len(parts),
        weights=own,
        gate_up=gate_up,
        per_layer=per_layer,
        experts=load_experts(config, own) if config.experts else None,
    )
