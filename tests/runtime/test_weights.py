"""Rows of weight tensors, as they are staged, become the tensors that the model computes with."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from millpond.codecs.messages import Tensor
from millpond.runtime.errors import ModelUnreadable
from millpond.runtime.families.linear import Dense, Packed, stacked
from millpond.runtime.weights import TensorBuilder


def message(shape: tuple[int, ...], first: int, rows: int, size: int, **more: str) -> Tensor:
    whole = {"name": "w.weight", "encoding": "f32", "scale_dtype": ""} | more
    return Tensor(
        shape=shape, first_row=first, rows=rows, slot=0, lease=0, payload_bytes=size, **whole
    )


def send(builder: TensorBuilder, values: np.ndarray, rows: int, **more: str) -> None:
    """Send a tensor in ranges of ``rows`` rows, each in a buffer that is overwritten afterwards."""
    matrix = values.reshape(-1, values.shape[-1])
    for first in range(0, len(matrix), rows):
        payload = bytearray(matrix[first : first + rows].tobytes())
        count = len(matrix[first : first + rows])
        builder.add(message(values.shape, first, count, len(payload), **more), memoryview(payload))
        payload[:] = b"\xff" * len(payload)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def held(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_float32_rows_are_held_to_the_bit_however_they_are_cut(rows: int) -> None:
    builder, values = TensorBuilder(mx.float32), floats(7, 33)
    send(builder, values, rows)
    found = builder.finish()["w.weight"]
    assert isinstance(found, Dense)
    assert found.weight.dtype == mx.float32
    assert np.array_equal(held(found.weight), values)


@pytest.mark.parametrize(
    ("encoding", "compute"),
    list(itertools.product(("f32", "f16", "bf16"), (mx.float32, mx.float16, mx.bfloat16))),
)
def test_every_staged_encoding_is_held_in_the_compute_dtype(
    encoding: str, compute: mx.Dtype
) -> None:
    values = mx.array(floats(5, 64))
    staged = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[encoding]
    stored = values.astype(staged)
    raw = np.array(stored.view(mx.uint16) if staged == mx.bfloat16 else stored)
    builder = TensorBuilder(compute)
    send(builder, raw, 2, encoding=encoding)
    found = builder.finish()["w.weight"].weight
    assert found.dtype == compute
    assert np.array_equal(held(found), held(stored.astype(compute)))


def test_a_vector_is_a_plain_array_and_rope_frequencies_stay_float32() -> None:
    builder = TensorBuilder(mx.bfloat16)
    send(builder, floats(12), 1, name="norm.weight")
    send(builder, floats(12), 1, name="rope_freqs.weight")
    found = builder.finish()
    assert found["norm.weight"].dtype == mx.bfloat16
    assert found["rope_freqs.weight"].dtype == mx.float32
    assert np.array_equal(np.array(found["rope_freqs.weight"]), floats(12))


@pytest.mark.parametrize("compute", [mx.float32, mx.bfloat16])
def test_packed_rows_are_what_mlx_quantises(compute: mx.Dtype) -> None:
    values = mx.array(floats(6, 128))
    parts = [np.array(part) for part in mx.quantize(values, group_size=32, bits=4)]
    builder = TensorBuilder(compute)
    for first in (0, 4):
        payload = b"".join(part[first : first + 4].tobytes() for part in parts)
        rows = len(parts[0][first : first + 4])
        sent = message((6, 128), first, rows, len(payload), encoding="q4g32", scale_dtype="f32")
        builder.add(sent, memoryview(payload))
    found = builder.finish()["w.weight"]
    assert isinstance(found, Packed)
    assert (found.bits, found.group) == (4, 32)
    for ours, theirs in zip((found.weight, found.scales, found.biases), parts, strict=True):
        assert np.array_equal(np.array(ours), theirs)
    assert found.rows(mx.array([5, 0])).shape == (2, 128)


def test_experts_keep_their_three_axes() -> None:
    builder, values = TensorBuilder(mx.float32), floats(3, 4, 8)
    send(builder, values, 5)
    assert np.array_equal(held(builder.finish()["w.weight"].weight), values)


def test_a_large_tensor_passes_in_slices_without_a_gap() -> None:
    builder, values = TensorBuilder(mx.float16), floats(2100, 1024)
    send(builder, values, 2000)
    assert np.array_equal(held(builder.finish()["w.weight"].weight), values.astype(np.float16))


BAD = {
    "a gap": [(0, 2, {}), (3, 1, {})],
    "rows twice": [(0, 2, {}), (0, 2, {})],
    "another tensor between": [(0, 2, {}), (2, 2, {"name": "other.weight"})],
    "another encoding": [(0, 2, {}), (2, 2, {"encoding": "f16"})],
    "a first range that is not the first": [(1, 2, {})],
    "more rows than there are": [(0, 5, {})],
    "an unknown encoding": [(0, 1, {"encoding": "q4_0"})],
    "packed without a dtype of scales": [(0, 1, {"encoding": "q4g32"})],
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_do_not_follow_are_refused(case: str) -> None:
    builder = TensorBuilder(mx.float32)
    with pytest.raises(ModelUnreadable, match="found"):
        for first, rows, more in BAD[case]:
            size = 4 * 32 * rows
            builder.add(message((4, 32), first, rows, size, **more), memoryview(bytes(size)))


@pytest.mark.parametrize("size", [4 * 32 * 4 - 4, 4 * 32 * 4 + 4])
def test_a_payload_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ModelUnreadable, match=r"found \d+ bytes"):
        TensorBuilder(mx.float32).add(message((4, 32), 0, 4, size), memoryview(bytes(size)))


def test_a_tensor_sent_twice_is_refused() -> None:
    builder = TensorBuilder(mx.float32)
    send(builder, floats(4, 32), 4)
    with pytest.raises(ModelUnreadable, match="twice"):
        send(builder, floats(4, 32), 4)


def test_a_tensor_that_ends_early_is_refused() -> None:
    builder = TensorBuilder(mx.float32)
    builder.add(message((4, 32), 0, 3, 384), memoryview(bytes(384)))
    with pytest.raises(ModelUnreadable, match=r"found 3 rows, expected 4"):
        builder.finish()


def test_joined_maps_take_their_parts_out_and_give_the_same_numbers() -> None:
    a, b, x = (mx.array(floats(*shape)) for shape in ((24, 32), (8, 32), (3, 32)))
    weights = {"a": Dense(a), "b": Dense(b), "c": Dense(a)}
    both = stacked(weights, ["a", "b"])
    assert list(weights) == ["c"], "a part that stays would hold its memory"
    assert np.allclose(
        held(both(x)), np.concatenate([held(x @ a.T), held(x @ b.T)], axis=1), atol=1e-5
    )


def test_maps_of_different_forms_stay_apart_and_give_the_same_numbers() -> None:
    a, b, x = (mx.array(floats(*shape)) for shape in ((24, 64), (8, 64), (3, 64)))
    for bits in ((4, 8), (4, 4)):
        packed = [
            Packed(*mx.quantize(w, group_size=32, bits=count), count, 32)
            for w, count in zip((a, b), bits, strict=True)
        ]
        expected = np.concatenate([held(one(x)) for one in packed], axis=1)
        both = stacked({"a": packed[0], "b": packed[1]}, ["a", "b"])
        assert isinstance(both, Packed) == (bits[0] == bits[1])
        assert np.allclose(held(both(x)), expected, atol=1e-5)
