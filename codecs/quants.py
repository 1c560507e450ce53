"""GGUF quantisation blocks → float32, to the last bit; numpy only, no file, no MLX.

A tensor is cut into slices that fit the cache; a kernel turns the blocks of one slice into numbers.
``blocks`` is (n, block_bytes) bytes, ``out`` is (n, block_values) float32, both of one slice.

Layouts of the 32-value blocks (all little-endian; d and m are float16):

    Q4_0  d qs[16]          d·(q - 8)      q[j] = qs[j] & 15, q[j + 16] = qs[j] >> 4
    Q4_1  d m qs[16]        d·q + m
    Q5_0  d qh[4] qs[16]    d·(q - 16)     bit j of qh is bit 4 of q[j]
    Q5_1  d m qh[4] qs[16]  d·q + m
    Q8_0  d qs[32]          d·q            q signed

Source: the block structures of ggml; K-quants are in ``codecs.quants_k``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from millpond.codecs.ggml_types import BY_NAME, GgmlType
from millpond.codecs.quants_k import K_KERNELS
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Kernel = Callable[[Bytes, Floats], None]

SLICE_VALUES = 2**16  # 256 KiB of float32: the kernels' temporaries stay in the second-level cache


def dequantise(kind: GgmlType, raw: memoryview | bytes, out: Floats) -> None:
    """Write the weights of whole quantisation blocks to ``out``.

    raw  the blocks' bytes
    out  float32, contiguous, one element per weight; its shape does not matter

    Raises KeyError for a type that is not in ``DEQUANTISED`` and ValueError for lengths that do not
    fit; both are checked by the caller beforehand.
    """
    kernel = _KERNELS[kind.name]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, kind.block_bytes)
    target = out.reshape(-1, kind.block_values)
    if len(target) != len(blocks):
        raise ValueError(f"{kind.name}: found {len(blocks)} blocks for {len(target)}")
    step = SLICE_VALUES // kind.block_values
    with np.errstate(all="ignore"):  # hostile scales: infinities and NaN are their numbers
        for start in range(0, len(blocks), step):
            kernel(blocks[start : start + step], target[start : start + step])


def unpack_nibbles(packed: Bytes) -> Bytes:
    """(n, 16) → (n, 32): the low halves of all bytes, then the high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def unpack_fifths(high: Bytes, packed: Bytes) -> Bytes:
    """(n, 4) and (n, 16) → (n, 32) of 0..31: a nibble with its fifth bit."""
    quants = np.unpackbits(high, axis=1, bitorder="little")
    quants <<= 4
    quants |= unpack_nibbles(packed)
    return quants


def halves(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte ``start`` of each block as (n, 1) float32."""
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    quants = unpack_nibbles(blocks[:, 2:]).view(np.int8)
    quants -= 8
    np.multiply(quants, halves(blocks, 0), out=out)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(unpack_nibbles(blocks[:, 4:]), halves(blocks, 0), out=out)
    out += halves(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    quants = unpack_fifths(blocks[:, 2:6], blocks[:, 6:]).view(np.int8)
    quants -= 16
    np.multiply(quants, halves(blocks, 0), out=out)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(unpack_fifths(blocks[:, 4:8], blocks[:, 8:]), halves(blocks, 0), out=out)
    out += halves(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), halves(blocks, 0), out=out)


_KERNELS: Mapping[str, Kernel] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    **K_KERNELS,
}

# Names of the types that ``dequantise`` reads.
DEQUANTISED: tuple[str, ...] = tuple(name for name in BY_NAME if name in _KERNELS)
