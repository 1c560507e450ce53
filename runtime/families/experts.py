"""Mixture of experts of Gemma 4: a router over all experts, the best few mixed.

Formulas: MoE section of the project's facts file.  Pinned thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from millpond.runtime.families.base import gelu_tanh
from millpond.runtime.families.config import ModelConfig
from millpond.runtime.families.linear import Dense, Linear, Packed
from millpond.runtime.kv.cache import Array


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer.

    router       (E, D) map
    router_scale (D), on the router's input
    gate, up     maps (E, F, D); ``up`` is None where ``gate`` holds both, gate first
    down         map (E, D, F)
    down_scale   (E), on each expert's output
    """

    router: Linear
    router_scale: Array
    gate: Dense | Packed
    up: Dense | Packed | None
    down: Dense | Packed
    down_scale: Array

    def mix(self, residual: Array, x: Array, config: ModelConfig) -> Array:
        """Return the weighted sum of the best experts' outputs, (n, D).

        residual  the un-normed stream after a weight-free RMSNorm, what the router looks at
        x         the normed input of the experts
        """
        looked = residual * self.router_scale * config.hidden**-0.5
        shares = mx.softmax(self.router(looked).astype(mx.float32), axis=-1)
        best = mx.argpartition(-shares, kth=config.experts_used - 1, axis=-1)
        best = best[:, : config.experts_used]
        weights = mx.take_along_axis(shares, best, axis=-1)
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        weights = weights * self.down_scale[best]
        inner = _gathered(self.gate, x[:, None, None, :], best)
        if self.up is None:
            gate, up = mx.split(inner, 2, axis=-1)
        else:
            gate, up = inner, _gathered(self.up, x[:, None, None, :], best)
        outputs = _gathered(self.down, gelu_tanh(gate) * up, best)[:, :, 0, :]
        return mx.sum(outputs * weights[:, :, None].astype(outputs.dtype), axis=1)


def load_experts(config: ModelConfig, own: Mapping[str, Any]) -> Experts:
    """Pick the experts' tensors out of a layer's, fused or split."""
    fused = own.get("ffn_gate_up_exps")
    return Experts(
        router=own["ffn_gate_inp"],
        router_scale=own["ffn_gate_inp.scale"],
        gate=fused if fused is not None else own["ffn_gate_exps"],
        up=None if fused is not None else own["ffn_up_exps"],
        down=own["ffn_down_exps"],
        down_scale=own["ffn_down_exps.scale"],
    )


def _gathered(stack: Dense | Packed, x: Array, chosen: Array) -> Array:
    """x (n, 1 or k, 1, in), experts chosen (n, k) → (n, k, 1, out)."""
    if isinstance(stack, Dense):
        return mx.gather_mm(x, stack.weight.swapaxes(-1, -2), rhs_indices=chosen)
    return mx.gather_qmm(
        x,
        stack.weight,
        stack.scales,
        stack.biases,
        rhs_indices=chosen,
        transpose=True,
        group_size=stack.group,
        bits=stack.bits,
    )
