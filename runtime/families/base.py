"""What a family is, and the small functions that several of them use.

Pinned thread only.  Hidden states are (n, D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import mlx.core as mx
from millpond.runtime.families import host_kernels
from millpond.runtime.families.linear import FEW_ROWS, in_host_floats
from millpond.runtime.kv.cache import Array
from millpond.runtime.kv.passes import Pass, Position


def gelu_tanh(x: Array) -> Array:
    """GELU in its tanh form: 0.5·x·(1 + tanh(sqrt(2/π)·(x + 0.044715·x³)))."""
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def gelu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gelu_tanh(gate) · up."""
    if _on_host(gate_up):
        return host_kernels.gelu_gated(gate_up)
    return _gated(_gelu_times, gate_up)


def silu_gated(gate_up: Array) -> Array:
    """(n, 2F), gate then up → (n, F): gate · sigmoid(gate) · up."""
    if _on_host(gate_up):
        return host_kernels.silu_gated(gate_up)
    return _gated(_silu_times, gate_up)


def _gelu_times(gate: Array, up: Array) -> Array:
    return gelu_tanh(gate) * up


def _silu_times(gate: Array, up: Array) -> Array:
    return gate * mx.sigmoid(gate) * up


def _gated(times: Callable[[Array, Array], Array], gate_up: Array) -> Array:
    """Apply to both halves; on a GPU in one pass over memory instead of about ten."""
    gate, up = mx.split(gate_up, 2, axis=-1)
    if mx.default_device() == mx.cpu:
        return times(gate, up)
    found: Array = _compiled(times)(gate, up)
    return found


@lru_cache
def _compiled(times: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return mx.compile(times, shapeless=True)


def _on_host(x: Array) -> bool:
    """True for a chunk in float32 on a CPU: numpy is faster there; few tokens are not worth it."""
    return x.shape[0] > FEW_ROWS and in_host_floats(x)


def soft_capped(logits: Array, cap: float) -> Array:
    """Return float32 logits, c·tanh(x/c) if there is a cap c."""
    found = logits.astype(mx.float32)
    return mx.tanh(found / cap) * cap if cap else found


class InPlaceDecode(Protocol):
    """One token of each of some sequences, by kernels that write its row into the caches.

    A sequence's logits do not depend on the others.
    """

    def __call__(
        self, token_ids: Array, positions: Array, rows: Sequence[Sequence[Array]]
    ) -> tuple[Array, Array]:
        """Return float32 logits (sequences, V) and the best id of each, not evaluated.

        token_ids, positions  (sequences,), uint32 and int32
        rows                  of each sequence: ``LayerCache.in_place`` of each layer in turn, then
                              int32 zeros, as many as a layer has KV heads at most; evaluated
        """


class Family(Protocol):
    """The forward pass of one architecture.

    in_place  decode steps by kernels of this device, or None
    """

    in_place: InPlaceDecode | None

    def forward(self, token_ids: Array, kv: Pass, first: Position) -> Array:
        """Run tokens at positions ``first`` on, (n,) → hidden states before the head, (n, D).

        Either n tokens of one sequence, or one token of each of n sequences.
        """

    def logits(self, hidden: Array) -> Array:
        """(n, D) → float32 logits, (n, V)."""
