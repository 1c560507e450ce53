"""CUDA kernels for decoding: few operations a layer, each bound by reading weights or rows once.

MLX builds and encodes operations one by one, several microseconds each on the host; a decode step
made of its own operations waits for the host, not for memory.

A result depends on its own sequence alone: sums run in an order that neither the count of
sequences nor the capacity of a buffer changes.  Arithmetic is float32, stored as the arrays are.

Pinned thread only.  The first use of a kernel compiles it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
from millpond.runtime.families.cuda_sources import ADD_NORM, ATTEND, LOAD, PRODUCT
from millpond.runtime.kv.cache import Array

WARP = 32


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is made for; ``window`` 0 for a full layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    scale: float
    rope_base: float
    rope_scale: float
    eps: float

    @property
    def splits(self) -> int:
        """Blocks that share the rows of a KV head."""
        return 32 if not self.window else max(1, min(32, self.window // 64))

    @property
    def warps(self) -> int:
        """Warps of a block: what they found lies in 32 KiB of shared memory."""
        return max(1, min(8, 8192 // (self.heads // self.kv_heads * self.head_dim)))

    @property
    def is_served(self) -> bool:
        """True if the kernel can be built for it."""
        group = self.heads // self.kv_heads * self.head_dim
        return self.head_dim in (64, 128, 256, 512) and group <= 2048


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows in one layer, and the counters that its blocks take turns by.

    keys, values  (1, kv_heads, capacity, head_dim), contiguous, evaluated
    turns         (kv_heads,) int32, zeros
    """

    keys: Array
    values: Array
    turns: Array


def attend(
    shape: AttentionShape,
    qkv: Array,
    norms: tuple[Array, Array],
    positions: Array,
    rows: Sequence[SequenceRows],
) -> Array:
    """Attention of one new token of each sequence; its row goes into the sequence's cache.

    qkv        (sequences, (heads + 2 · kv_heads) · head_dim), before norms and rotation
    norms      of queries and keys, (head_dim,)
    positions  (sequences,) int32
    Returns (sequences, heads · head_dim).
    """
    count = len(rows)
    kernel = _attend_kernel(shape, count)
    threads = WARP * shape.warps
    places = (count, shape.heads, shape.splits)
    found: list[Array] = kernel(
        inputs=[
            qkv,
            *norms,
            positions,
            *(one.keys for one in rows),
            *(one.values for one in rows),
            *(one.turns for one in rows),
        ],
        template=[("T", qkv.dtype), ("KT", rows[0].keys.dtype)],
        grid=(shape.splits * threads, shape.kv_heads, count),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (count, shape.heads * shape.head_dim),
            (*places, shape.head_dim),
            (*places, 2),
        ],
        output_dtypes=[qkv.dtype, mx.float32, mx.float32],
    )
    return found[0]


@lru_cache(maxsize=64)
def _attend_kernel(shape: AttentionShape, count: int) -> Any:
    names = [f"{kind}{i}" for kind in ("keys_", "values_", "turns_") for i in range(count)]
    lists = {
        "KEYS_LIST": ", ".join(f"const_cast<KT*>(keys_{i})" for i in range(count)),
        "VALUES_LIST": ", ".join(f"const_cast<KT*>(values_{i})" for i in range(count)),
        "TURNS_LIST": ", ".join(f"const_cast<int*>(turns_{i})" for i in range(count)),
        "CAPACITIES_LIST": ", ".join(f"keys_{i}_shape[2]" for i in range(count)),
    }
    values: dict[str, int | float] = {
        "H": shape.heads,
        "KV": shape.kv_heads,
        "HD": shape.head_dim,
        "WINDOW": shape.window,
        "SPLITS": shape.splits,
        "WARPS": shape.warps,
        "COUNT": count,
        "SCALE": shape.scale,
        "EPS": shape.eps,
        "ROPE_SCALE": shape.rope_scale,
        "LOG2_BASE": math.log2(shape.rope_base),
    }
    source = _constants(values) + _with_lists(ATTEND, lists)
    inputs = ["qkv", "q_norm", "k_norm", "positions", *names]
    return _built("attend", source, inputs, ["out", "partial", "stats"])


def product(x: Array, weight: Array) -> Array:
    """x · Wᵀ for few rows of x: (sequences, K) and (N, K) → (sequences, N); see ``is_served``."""
    return _product(x, weight, weight.shape[0], is_gated=0)


def gated_product(x: Array, weight: Array) -> Array:
    """gelu_tanh(x · Gᵀ) · (x · Uᵀ), W = (G, U) → (sequences, N / 2)."""
    return _product(x, weight, weight.shape[0] // 2, is_gated=1)


def is_served(inner: int, dtype: Any) -> bool:
    """True if products over ``inner`` values can be read in pieces of 16 bytes."""
    return inner * int(dtype.size) % 16 == 0


def _product(x: Array, weight: Array, width: int, is_gated: int) -> Array:
    count, inner = x.shape
    rows = 2 if is_gated or width < 8192 else 4
    values = {
        "COUNT": count,
        "K": inner,
        "N": width,
        "ROWS": rows,
        "GATED": is_gated,
        "UNROLL": 2 if count > 2 else 4,
    }
    threads = 4 * WARP
    blocks = math.ceil(width / (rows * threads // WARP))
    found: list[Array] = _kernel("product", PRODUCT, ("x", "w"), ("out",), _frozen(values))(
        inputs=[x, weight],
        template=[("T", x.dtype)],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(count, width)],
        output_dtypes=[x.dtype],
    )
    return found[0]


def add_norm(x: Array, y: Array, weights: tuple[Array, Array], eps: float) -> tuple[Array, Array]:
    """Return s = x + rms(y) · w₀ and rms(s) · w₁; all (sequences, D)."""
    count, width = x.shape
    threads = min(1024, math.ceil(width / WARP) * WARP)
    values = {"D": width, "THREADS": threads, "EPS": eps}
    inputs, outputs = ("x", "y", "w_y", "w_next"), ("sum", "normed")
    found: list[Array] = _kernel("add_norm", ADD_NORM, inputs, outputs, _frozen(values))(
        inputs=[x, y, *weights],
        template=[("T", x.dtype)],
        grid=(count * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return found[0], found[1]


_Frozen = tuple[tuple[str, int | float], ...]


def _frozen(values: Mapping[str, int | float]) -> _Frozen:
    return tuple(values.items())


@lru_cache(maxsize=256)
def _kernel(
    name: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...], values: _Frozen
) -> Any:
    return _built(name, _constants(dict(values)) + body, inputs, outputs)


def _built(name: str, source: str, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """MLX keeps compiled kernels by name, so the name holds a digest of the source."""
    digest = hashlib.sha256((LOAD + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"millpond_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=LOAD,
        ensure_row_contiguous=False,
    )


def _constants(values: Mapping[str, int | float]) -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, int):
            lines.append(f"  constexpr int {name} = {value};\n")
        else:
            lines.append(f"  constexpr float {name} = {value!r}f;\n")
    return "".join(lines)


def _with_lists(body: str, lists: Mapping[str, str]) -> str:
    for name, text in lists.items():
        body = body.replace(name, text)
    return body
