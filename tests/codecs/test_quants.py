"""Dequantising is exact to the last bit; repacking gives the same numbers in MLX's layout."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as oracle
from millpond.codecs.ggml_types import BY_NAME
from millpond.codecs.quants import DEQUANTISED, SLICE_VALUES, dequantise
from millpond.codecs.repack import REPACKED, PackedParts, packed_bytes, repack

# Where the float16 numbers of a block lie: scales must be finite for a comparison of bits.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, blocks: int, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (blocks, BY_NAME[name].block_bytes), dtype=np.uint8)
    for start in HALVES.get(name, ()):
        numbers = random.normal(0, 0.05, (blocks, 1)).astype(np.float16)
        raw[:, start : start + 2] = numbers.view(np.uint8)
    if name in ("F32", "F16", "BF16"):
        width = {"F32": np.float32, "F16": np.float16, "BF16": np.float32}[name]
        numbers = random.normal(0, 1, (blocks, 1)).astype(width)
        raw[:] = numbers.view(np.uint8)[:, -BY_NAME[name].block_bytes :]
    return raw


@pytest.mark.parametrize("name", DEQUANTISED)
@pytest.mark.parametrize("slices", ["one block", "several slices"])
def test_dequantised_weights_equal_the_oracle_bit_for_bit(name: str, slices: str) -> None:
    kind = BY_NAME[name]
    blocks = 1 if slices == "one block" else 2 * SLICE_VALUES // kind.block_values + 3
    raw = random_blocks(name, blocks)
    out = np.full(blocks * kind.block_values, np.nan, np.float32)
    dequantise(kind, raw.tobytes(), out)
    expected = oracle(raw.reshape(-1), GGMLQuantizationType[name])
    assert np.array_equal(out.view(np.uint32), expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("name", DEQUANTISED)
def test_any_bytes_give_numbers_without_a_warning(name: str) -> None:
    kind = BY_NAME[name]
    for fill in (0, 255, 0x7C):
        raw = bytes([fill]) * (kind.block_bytes * 3)
        dequantise(kind, raw, np.empty(3 * kind.block_values, np.float32))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="found 2 blocks for 1"):
        dequantise(BY_NAME["Q8_0"], bytes(68), np.empty(32, np.float32))


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_weights_have_the_same_values(name: str) -> None:
    kind, bits = BY_NAME[name], REPACKED[name]
    columns = 3 * max(kind.block_values, 32)
    rows = 2 * SLICE_VALUES // columns + 1
    values = rows * columns
    raw = random_blocks(name, values // kind.block_values).tobytes()
    expected = np.empty(values, np.float32)
    dequantise(kind, raw, expected)
    buffer = memoryview(bytearray(packed_bytes(values, bits)))
    parts = PackedParts.inside(buffer, values, bits)
    repack(kind, raw, parts)
    found = affine(parts, bits, values)
    assert np.array_equal(found, expected)
    mx = pytest.importorskip("mlx.core")
    with mx.stream(mx.cpu):
        got = mx.dequantize(
            mx.array(parts.packed.reshape(rows, -1)),
            mx.array(parts.scales.reshape(rows, -1)),
            mx.array(parts.biases.reshape(rows, -1)),
            group_size=32,
            bits=bits,
        )
        assert np.array_equal(np.array(got).reshape(-1), expected)


def affine(parts: PackedParts, bits: int, values: int) -> np.ndarray:
    """Read the packed bit stream one bit at a time: slow, and independent of how it was packed."""
    stream = np.unpackbits(parts.packed.view(np.uint8), bitorder="little").reshape(values, bits)
    quants = (stream * (1 << np.arange(bits))).sum(axis=1).astype(np.float32)
    return np.repeat(parts.scales, 32) * quants + np.repeat(parts.biases, 32)
