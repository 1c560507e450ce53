"""K-quants, blocks of 256 values, → float32; numpy only.

Layouts, little-endian, d and dmin float16 (``half h`` is 128 values, ``group g`` 16 or 32):

    Q2_K  scales[16] qs[64] d dmin          d·(s & 15)·q - dmin·(s >> 4); half h has qs[32h..],
                                            group of 32 number k in it is (qs >> 2k) & 3
    Q3_K  hmask[32] qs[64] scales[12] d     d·(s - 32)·(q - 4), q = 2 bits of qs as in Q2_K, plus 4
                                            if bit g of hmask[j] is set (g = 0..7 groups of 32)
    Q4_K  d dmin scales[12] qs[128]         d·s·q - dmin·m; per 64 values 32 bytes: low nibbles are
                                            the first 32 values, high nibbles the next
    Q5_K  d dmin scales[12] qh[32] qs[128]  as Q4_K, bit g of qh[j] is bit 4 of value 32g + j
    Q6_K  ql[128] qh[64] scales[16] d       d·s·(q - 32), s signed; half h: ql[64h..], qh[32h..];
                                            values j, 32 + j, 64 + j, 96 + j are ql[j] & 15,
                                            ql[32 + j] & 15, ql[j] >> 4, ql[32 + j] >> 4, with two
                                            bits of qh[j] at shift 0, 2, 4, 6

Twelve bytes b hold 6-bit scales.  Q4_K, Q5_K, for group g of 8:

    g < 4    s = b[g] & 63                            m = b[g + 4] & 63
    g >= 4   s = b[g + 4] & 15 | (b[g - 4] >> 6) << 4   m = b[g + 4] >> 4 | (b[g] >> 6) << 4

Q3_K, for group g of 16: low nibble b[g % 8] >> (0 if g < 8 else 4), high bits
(b[8 + g % 4] >> 2·(g // 4)) & 3.

Source: the block structures of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_SHIFTS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)


def q4_k_parts(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Return quants (n, 8, 32) of 0..15, scales d·s and offsets dmin·m, both (n, 8, 1)."""
    scales, offsets = _scales_and_offsets(blocks)
    return _nibble_groups(blocks[:, 16:]), scales, offsets


def q5_k_parts(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """As ``q4_k_parts``, quants of 0..31."""
    scales, offsets = _scales_and_offsets(blocks)
    quants = _nibble_groups(blocks[:, 48:])
    high = np.unpackbits(blocks[:, 16:48].reshape(-1, 32, 1), axis=2, bitorder="little")
    quants |= high.transpose(0, 2, 1) << 4
    return quants, scales, offsets


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _scaled(q4_k_parts(blocks), out.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes, out: Floats) -> None:
    _scaled(q5_k_parts(blocks), out.reshape(-1, 8, 32))


def _q2_k(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, :16]
    scales = (packed & 15) * _half(blocks, 80)
    offsets = (packed >> 4) * _half(blocks, 82)
    quants = _crumbs(blocks[:, 16:80]).reshape(-1, 16, 16)
    _scaled(
        (quants, scales.reshape(-1, 16, 1), offsets.reshape(-1, 16, 1)), out.reshape(-1, 16, 16)
    )


def _q3_k(blocks: Bytes, out: Floats) -> None:
    b = blocks[:, 96:108]
    low = np.concatenate((b[:, :8] & 15, b[:, :8] >> 4), axis=1)
    high = (b[:, 8:].reshape(-1, 1, 1, 4) >> _SHIFTS.reshape(1, 4, 1, 1)) & 3
    signed = (low | high.reshape(-1, 16) << 4).view(np.int8) - np.int8(32)
    scales = signed * _half(blocks, 108)
    quants = _crumbs(blocks[:, 32:96])
    mask = np.unpackbits(blocks[:, :32].reshape(-1, 32, 1), axis=2, bitorder="little")
    quants |= mask.transpose(0, 2, 1).reshape(quants.shape) << 2
    centred = quants.view(np.int8)
    centred -= 4
    np.multiply(centred.reshape(-1, 16, 16), scales.reshape(-1, 16, 1), out=out.reshape(-1, 16, 16))


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    quants = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFTS
    high &= 3
    high <<= 4
    quants |= high
    centred = quants.view(np.int8)
    centred -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    np.multiply(centred.reshape(-1, 16, 16), scales.reshape(-1, 16, 1), out=out.reshape(-1, 16, 16))


def _scaled(parts: tuple[Bytes, Floats, Floats], out: Floats) -> None:
    quants, scales, offsets = parts
    np.multiply(quants, scales, out=out)
    out -= offsets


def _nibble_groups(packed: Bytes) -> Bytes:
    """(n, 128) → (n, 8, 32)."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((quarters & 15, quarters >> 4), axis=2).reshape(-1, 8, 32)


def _crumbs(packed: Bytes) -> Bytes:
    """(n, 64) → (n, 2, 4, 32) of 0..3: two bits of each byte at shift 0, 2, 4, 6."""
    quants = packed.reshape(-1, 2, 1, 32) >> _SHIFTS
    quants &= 3
    return quants


def _scales_and_offsets(blocks: Bytes) -> tuple[Floats, Floats]:
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | (first >> 6) << 4), axis=1)
    offsets = np.concatenate((second & 63, third >> 4 | (second >> 6) << 4), axis=1)
    scaled: Floats = scales * _half(blocks, 0)
    shifted: Floats = offsets * _half(blocks, 2)
    return scaled.reshape(-1, 8, 1), shifted.reshape(-1, 8, 1)


def _half(blocks: Bytes, start: int) -> Floats:
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


K_KERNELS: Mapping[str, Callable[[Bytes, Floats], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
