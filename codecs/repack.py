"""GGUF quantisation blocks → MLX affine quantisation, the same numbers: ``scale·q + bias``.

Groups of 32 along a row.  A packed row is one little-endian bit stream, element i at bits
[i·b, (i + 1)·b), viewed as uint32; one float32 scale and bias per group:

    Q4_0  b = 4   scale d     bias -8·d         Q4_1  b = 4   d    m
    Q5_0  b = 5   scale d     bias -16·d        Q5_1  b = 5   d    m
    Q8_0  b = 8   scale d     bias -128·d       (q + 128 is stored)
    Q4_K  b = 4   scale d·s   bias -dmin·m      Q5_K  b = 5   likewise

Every product is exact in float32 or the very product that dequantising makes.  Q6_K, Q3_K and Q2_K
have groups of 16, which MLX's matrix products do not take.

Source of the packing: MLX's ``quantize``, found by comparing with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from millpond.codecs.ggml_types import GgmlType
from millpond.codecs.quants import SLICE_VALUES, halves, unpack_fifths, unpack_nibbles
from millpond.codecs.quants_k import q4_k_parts, q5_k_parts
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
GROUP_VALUES = 32

# Type → bits of one packed weight.
REPACKED: Mapping[str, int] = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q8_0": 8,
    "Q4_K": 4,
    "Q5_K": 5,
}


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Where repacked weights go: contiguous, one entry of scales and biases per group.

    packed  uint32, ``bits`` per weight
    scales, biases  float32
    """

    packed: NDArray[np.uint32]
    scales: Floats
    biases: Floats

    @classmethod
    def inside(cls, buffer: memoryview, values: int, bits: int) -> PackedParts:
        """Lay the parts one after another into a buffer of ``packed_bytes(values, bits)``."""
        groups = values // GROUP_VALUES
        words = values * bits // 32
        numbers = np.frombuffer(buffer, np.uint32)
        floats = numbers[words:].view(np.float32)
        return cls(numbers[:words], floats[:groups], floats[groups:])

    def part(self, first: int, values: int, bits: int) -> PackedParts:
        """Return the places of ``values`` weights from ``first`` on, both whole groups."""
        words = slice(first * bits // 32, (first + values) * bits // 32)
        groups = slice(first // GROUP_VALUES, (first + values) // GROUP_VALUES)
        return PackedParts(self.packed[words], self.scales[groups], self.biases[groups])


def packed_bytes(values: int, bits: int) -> int:
    """Bytes of packed weights, scales and biases of ``values`` weights."""
    return values * bits // 8 + values // GROUP_VALUES * 8


def repack(kind: GgmlType, raw: memoryview | bytes, parts: PackedParts) -> None:
    """Re-lay whole quantisation blocks; ``mx.dequantize`` of the parts gives their very numbers.

    Raises KeyError for a type that is not in ``REPACKED`` and ValueError for lengths that do not
    fit; both are checked by the caller beforehand.
    """
    unpack, pack = _UNPACK[kind.name], _PACK[REPACKED[kind.name]]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, kind.block_bytes)
    group_bytes = 4 * REPACKED[kind.name]
    groups = len(blocks) * kind.block_values // GROUP_VALUES
    packed = parts.packed.view(np.uint8).reshape(groups, group_bytes)
    step, ratio = SLICE_VALUES // kind.block_values, kind.block_values // GROUP_VALUES
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            quants, scales, biases = unpack(blocks[start : start + step])
            target = slice(start * ratio, start * ratio + len(quants))
            packed[target] = pack(quants)
            parts.scales[target] = scales
            parts.biases[target] = biases


Unpacked = tuple[Bytes, Floats, Floats]


def _q4_0(blocks: Bytes) -> Unpacked:
    scales = halves(blocks, 0)[:, 0]
    return unpack_nibbles(blocks[:, 2:]), scales, scales * np.float32(-8)


def _q4_1(blocks: Bytes) -> Unpacked:
    return unpack_nibbles(blocks[:, 4:]), halves(blocks, 0)[:, 0], halves(blocks, 2)[:, 0]


def _q5_0(blocks: Bytes) -> Unpacked:
    scales = halves(blocks, 0)[:, 0]
    return unpack_fifths(blocks[:, 2:6], blocks[:, 6:]), scales, scales * np.float32(-16)


def _q5_1(blocks: Bytes) -> Unpacked:
    quants = unpack_fifths(blocks[:, 4:8], blocks[:, 8:])
    return quants, halves(blocks, 0)[:, 0], halves(blocks, 2)[:, 0]


def _q8_0(blocks: Bytes) -> Unpacked:
    scales = halves(blocks, 0)[:, 0]
    return blocks[:, 2:] ^ np.uint8(128), scales, scales * np.float32(-128)


def _q4_k(blocks: Bytes) -> Unpacked:
    quants, scales, offsets = q4_k_parts(blocks)
    return quants.reshape(-1, GROUP_VALUES), scales.reshape(-1), -offsets.reshape(-1)


def _q5_k(blocks: Bytes) -> Unpacked:
    quants, scales, offsets = q5_k_parts(blocks)
    return quants.reshape(-1, GROUP_VALUES), scales.reshape(-1), -offsets.reshape(-1)


def _pack4(quants: Bytes) -> Bytes:
    """(n, 32) → (n, 16)."""
    return quants[:, 0::2] | quants[:, 1::2] << np.uint8(4)


def _pack5(quants: Bytes) -> Bytes:
    """(n, 32) → (n, 20): eight values are 40 bits, the low five bytes of a 64-bit word."""
    eights = quants.reshape(-1, 8)
    words = eights[:, 0].astype("<u8")
    for index in range(1, 8):
        words |= eights[:, index].astype(np.uint64) << np.uint64(5 * index)
    return words.view(np.uint8).reshape(-1, 8)[:, :5].reshape(-1, 20)


def _pack8(quants: Bytes) -> Bytes:
    return quants


_UNPACK: Mapping[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
_PACK: Mapping[int, Callable[[Bytes], Bytes]] = {4: _pack4, 5: _pack5, 8: _pack8}
