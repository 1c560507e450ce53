"""Token ranges of dense Gemma 4 caches: out and back to the bit, and every mismatch refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, KvSpillProvenance, LayerType
from millpond.runtime.errors import BlockError, CodecError, DescriptorError, KvRangeError

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from millpond.runtime.gemma4_dense_spill import (  # noqa: E402
    DenseBlock,
    Gemma4DenseSpill,
    Gemma4DenseSpillFactory,
)

S, F = LayerType.SLIDING, LayerType.FULL
WINDOW, DECODE, PROMPT = 8, 5, 20
DTYPES = list(KvDType)


def descriptor(dtype: KvDType = KvDType.F32, **changed: Any) -> KvSpillDescriptor:
    """Two sliding layers of 2 heads of 4, a full one of 1 of 8, one that shares layer 1."""
    whole = KvSpillDescriptor(
        sliding_window=WINDOW,
        max_decode_tokens=DECODE,
        num_layers=4,
        layer_types=(S, S, F, S),
        nkv_heads=(2, 2, 1, 2),
        head_dim=(4, 4, 8, 4),
        kv_dtype=dtype,
        provenance=KvSpillProvenance(),
        kv_source=(0, 1, 2, 1),
    )
    return msgspec.structs.replace(whole, **changed)


def factory(dtype: KvDType = KvDType.F32, **changed: Any) -> Gemma4DenseSpillFactory:
    return Gemma4DenseSpillFactory(descriptor(dtype, **changed), block_tokens=4)


def rows(dtype: KvDType, layer: int, first: int, tokens: int, which: int = 0) -> Any:
    """Bits that name layer, position and place: any mix-up of rows shows; NaNs are among them."""
    heads, dim = (1, 8) if layer == 2 else (2, 4)
    index = np.arange(first, first + tokens)[None, :, None]
    head, place = np.arange(heads)[:, None, None], np.arange(dim)[None, None, :]
    bits = (index * 7919 + head * 104729 + place * 1299709 + layer * 31 + which * 17) * 2654435761
    wide = dtype is KvDType.F32
    found = (bits >> 7).astype(np.uint32 if wide else np.uint16)
    return mx.array(found).view(dtype.to_mlx_dtype())


def fill(spill: Gemma4DenseSpill, dtype: KvDType, layer: int, first: int, tokens: int) -> None:
    keys, values = (rows(dtype, layer, first, tokens, which) for which in (0, 1))
    spill.write(layer, first, keys, values)


def payload(dtype: KvDType, layer: int, first: int, tokens: int) -> bytes:
    bits = mx.uint32 if dtype is KvDType.F32 else mx.uint16
    parts = [np.array(rows(dtype, layer, first, tokens, which).view(bits)) for which in (0, 1)]
    return b"".join(part.tobytes() for part in parts)


def state(spill: Gemma4DenseSpill) -> Any:
    return {
        layer: [(p, spill.snapshot_block(layer, p, 1).payload) for p in spill.positions(layer)]
        for layer in (0, 1, 2)
    }


# -- the descriptor


def test_groups_bytes_and_capacities_follow_the_descriptor() -> None:
    made = factory(KvDType.F16)
    assert [(g.layer_type, g.layers) for g in made.groups] == [(S, (0, 1)), (F, (2,))]
    assert [made.block_bytes(layer) for layer in range(4)] == [2 * 2 * 4 * 4 * 2] * 2 + [128, 0]
    assert made.block_bytes(2, 100) == 2 * 8 * 100 * 2
    assert [made.capacity(layer, PROMPT) for layer in (0, 1, 2)] == [WINDOW, WINDOW, 25]
    assert factory(KvDType.F32).block_bytes(0) == 2 * made.block_bytes(0)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("layer_types", (S, S, F), "layer_types: found 3 entries, expected 4"),
        ("nkv_heads", (2,) * 5, "nkv_heads: found 5"),
        ("head_dim", (), "head_dim: found 0"),
        ("kv_source", (0, 1), "kv_source: found 2"),
        ("num_layers", 3, "found 4 entries, expected 3"),
        ("sliding_window", 0, "sliding_window"),
        ("max_decode_tokens", -1, "max_decode_tokens"),
        ("nkv_heads", (2, 2, 0, 2), "found 0 heads"),
        ("head_dim", (4, 4, -8, 4), "of -8"),
        ("kv_source", (0, 1, 2, 4), "kv_source 4"),
        ("kv_source", (0, 1, 2, -1), "kv_source -1"),
        ("kv_source", (0, 0, 2, 1), "kv_source 1"),
        ("kv_source", (0, 1, 2, 2), "kv_source 2"),
    ],
)
def test_an_inconsistent_descriptor_is_refused(field: str, value: Any, match: str) -> None:
    with pytest.raises(DescriptorError, match=match):
        factory(**{field: value})


def test_a_model_without_layers_is_refused() -> None:
    empty: dict[str, Any] = dict.fromkeys(("layer_types", "nkv_heads", "head_dim", "kv_source"), ())
    with pytest.raises(DescriptorError, match="num_layers: found 0"):
        factory(num_layers=0, **empty)


def test_a_model_of_full_layers_needs_no_window() -> None:
    made = factory(
        sliding_window=0, layer_types=(F,) * 4, nkv_heads=(1,) * 4, head_dim=(8,) * 4, kv_source=()
    )
    assert made.capacity(3, 7) == 7 + DECODE


# -- out and back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_comes_back_byte_for_byte(dtype: KvDType, layer: int) -> None:
    cold = factory(dtype).spill(PROMPT)
    fill(cold, dtype, layer, 0, 7)
    block = cold.snapshot_block(layer, 2, 4)
    assert block.payload == payload(dtype, layer, 2, 4)
    assert len(block.payload) == factory(dtype).block_bytes(layer)
    warm = factory(dtype).spill(PROMPT)
    warm.restore_block(layer, 2, block)
    assert warm.snapshot_block(layer, 2, 4) == block
    assert warm.positions(layer) == [2, 3, 4, 5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrapped_ring_gives_its_rows_in_token_order(dtype: KvDType) -> None:
    spill = factory(dtype).spill(PROMPT)
    for position in range(21):  # one by one, as decode writes them: slots 5 to 7 and 0 to 4
        fill(spill, dtype, 1, position, 1)
    assert spill.positions(1) == list(range(13, 21))
    assert spill.snapshot_block(1, 13, WINDOW).payload == payload(dtype, 1, 13, WINDOW)
    assert spill.snapshot_block(1, 15, 3).payload == payload(dtype, 1, 15, 3)


def test_of_a_prefill_longer_than_the_window_the_last_rows_stay() -> None:
    spill = factory().spill(PROMPT)
    fill(spill, KvDType.F32, 0, 0, 19)
    assert spill.positions(0) == list(range(11, 19))
    assert spill.snapshot_block(0, 11, 8).payload == payload(KvDType.F32, 0, 11, 8)


def test_nothing_is_allocated_before_it_is_needed() -> None:
    spill = factory().spill(PROMPT)
    assert spill.bytes == 0
    fill(source := factory().spill(PROMPT), KvDType.F32, 0, 0, 4)
    spill.restore_block(0, 0, source.snapshot_block(0, 0, 4))
    assert spill.bytes == 2 * WINDOW * 2 * 4 * 4
    fill(spill, KvDType.F32, 2, 0, 1)
    assert spill.bytes == 2 * WINDOW * 2 * 4 * 4 + 2 * (PROMPT + DECODE) * 8 * 4


def test_decode_goes_on_where_a_restore_ended() -> None:
    whole, warm = factory().spill(PROMPT), factory().spill(PROMPT)
    for layer in (0, 2):
        fill(whole, KvDType.F32, layer, 0, 12)
        for first in (4, 8):
            warm.restore_block(layer, first, whole.snapshot_block(layer, first, 4))
        for spill in (whole, warm):
            fill(spill, KvDType.F32, layer, 12, 1)
        last = whole.snapshot_block(layer, 5, 8)
        assert warm.snapshot_block(layer, 5, 8) == last
        assert last.payload == payload(KvDType.F32, layer, 5, 8)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    layer=st.sampled_from([0, 1, 2]),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    cuts=st.data(),
)
def test_whatever_is_held_goes_out_and_back(
    dtype: KvDType, layer: int, steps: list[int], cuts: st.DataObject
) -> None:
    end = 0
    spill = factory(dtype).spill(45)
    for step in steps:
        fill(spill, dtype, layer, end, step)
        end += step
    start = 0 if layer == 2 else max(0, end - WINDOW)
    assert spill.positions(layer) == list(range(start, end))
    first = cuts.draw(st.integers(start, end - 1))
    tokens = cuts.draw(st.integers(1, end - first))
    block = spill.snapshot_block(layer, first, tokens)
    assert block.payload == payload(dtype, layer, first, tokens)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(block), type=DenseBlock)
    warm = factory(dtype).spill(45)
    warm.restore_block(layer, first, decoded)
    assert warm.snapshot_block(layer, first, tokens) == block
    before = state(spill)
    spill.restore_block(layer, first, block)  # the same rows once more: no change
    assert state(spill) == before


# -- refusals


def used() -> tuple[Gemma4DenseSpill, DenseBlock]:
    """Caches in use, and a block of layer 0 that fits where it was."""
    spill = factory().spill(PROMPT)
    for layer in (0, 1, 2):
        fill(spill, KvDType.F32, layer, 0, 12)
    return spill, spill.snapshot_block(0, 8, 4)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"layer": 1}, "layer: found 1, expected 0"),
        ({"layer_type": F}, "layer_type"),
        ({"kv_heads": 1}, "kv_heads: found 1, expected 2"),
        ({"head_dim": 8}, "head_dim: found 8, expected 4"),
        ({"kv_heads": 4, "head_dim": 2}, "kv_heads"),  # the same count of bytes
        ({"kv_dtype": KvDType.BF16}, "kv_dtype"),
        ({"first_token": 7}, "first_token: found 7, expected 8"),
        ({"tokens": 3}, "payload: found 256 bytes, expected 192"),
        ({"payload": b""}, "payload: found 0 bytes, expected 256"),
        ({"payload": bytes(255)}, "payload: found 255"),
        ({"payload": bytes(257)}, "payload: found 257"),
        ({"tokens": 0, "payload": b""}, "expected 1 to 8"),
        ({"tokens": -4}, "expected 1 to 8"),
        ({"tokens": 9, "payload": bytes(576)}, "expected 1 to 8"),
    ],
)
def test_a_block_that_does_not_fit_leaves_the_cache_untouched(
    changed: dict[str, Any], match: str
) -> None:
    spill, block = used()
    before = state(spill)
    with pytest.raises(CodecError, match=match) as caught:
        spill.restore_block(0, 8, msgspec.structs.replace(block, **changed))
    assert isinstance(caught.value, BlockError | KvRangeError)
    assert state(spill) == before
    fresh = factory().spill(PROMPT)
    with pytest.raises(CodecError):
        fresh.restore_block(0, 8, msgspec.structs.replace(block, **changed))
    assert fresh.bytes == 0 and fresh.positions(0) == []


def test_a_block_of_another_dtype_or_family_is_refused() -> None:
    _, block = used()
    for dtype in (KvDType.F16, KvDType.BF16):
        with pytest.raises(BlockError, match="kv_dtype: found"):
            factory(dtype).spill(PROMPT).restore_block(0, 8, block)
    other = factory(nkv_heads=(4, 4, 1, 4), head_dim=(2, 2, 8, 2)).spill(PROMPT)
    with pytest.raises(BlockError, match="kv_heads"):
        other.restore_block(0, 8, block)
    assert other.bytes == 0


def test_a_full_layer_takes_no_row_beyond_prompt_and_decode() -> None:
    spill, fits = factory().spill(PROMPT), PROMPT + DECODE
    fill(spill, KvDType.F32, 2, fits - 1, 1)
    wide = factory().spill(100)
    fill(wide, KvDType.F32, 2, 0, 50)
    spill.restore_block(2, fits - 4, wide.snapshot_block(2, fits - 4, 4))
    before = state(spill)
    for first in (fits - 3, fits, 40):
        with pytest.raises(KvRangeError, match=f"below {fits}"):
            spill.restore_block(2, first, wide.snapshot_block(2, first, 4))
    with pytest.raises(KvRangeError):
        fill(spill, KvDType.F32, 2, fits, 1)
    assert state(spill) == before


def test_an_old_block_never_replaces_newer_rows_of_a_ring() -> None:
    spill, block = used()
    fill(spill, KvDType.F32, 0, 12, 5)  # position 16 lies where 8 was
    before = state(spill)
    with pytest.raises(KvRangeError, match="newer rows, up to 16"):
        spill.restore_block(0, 8, block)
    with pytest.raises(KvRangeError, match="newer rows"):
        fill(spill, KvDType.F32, 0, 8, 1)
    assert state(spill) == before


@pytest.mark.parametrize(
    ("layer", "first", "tokens"),
    [
        *((0, 3, 4), (0, 0, 1), (0, 9, 4), (0, 12, 1), (0, -4, 4), (0, 4, 9), (0, 8, 0)),
        *((0, 8, -1), (2, -1, 1), (2, 11, 2), (2, 24, 1), (2, 25, 1), (2, 0, 26), (2, 10**12, 1)),
    ],
)
def test_rows_that_are_not_there_are_not_given_out(layer: int, first: int, tokens: int) -> None:
    spill, _ = used()
    with pytest.raises(KvRangeError):
        spill.snapshot_block(layer, first, tokens)


def test_a_cache_that_was_never_written_has_no_rows() -> None:
    with pytest.raises(KvRangeError, match="found other rows"):
        factory().spill(PROMPT).snapshot_block(0, 0, 1)
    with pytest.raises(KvRangeError, match="prompt_tokens"):
        factory().spill(-1)


@pytest.mark.parametrize(
    ("layer", "match"), [(3, "reads K and V of layer 1"), (4, "expected 0 to 3"), (-1, "found -1")]
)
def test_layers_that_share_or_do_not_exist_store_nothing(layer: int, match: str) -> None:
    spill, block = used()
    before = state(spill)
    keys = rows(KvDType.F32, 1, 12, 1)
    for attempt in (
        lambda: spill.snapshot_block(layer, 8, 4),
        lambda: spill.restore_block(layer, 8, msgspec.structs.replace(block, layer=layer)),
        lambda: spill.write(layer, 12, keys, keys),
        lambda: spill.positions(layer),
    ):
        with pytest.raises(DescriptorError, match=match):
            attempt()
    assert state(spill) == before


def test_rows_of_another_shape_or_dtype_are_not_written() -> None:
    spill, _ = used()
    before = state(spill)
    good = rows(KvDType.F32, 0, 12, 2)
    for keys, values in (
        (good, good[:, :1]),
        (good[:1], good),
        (good[..., :3], good),
        (good[:, :0], good[:, :0]),
        (good[0], good[0]),
        (good.astype(mx.float16), good),
        (good, good.view(mx.uint32)),
    ):
        with pytest.raises(BlockError, match=r"(keys|values): found"):
            spill.write(0, 12, keys, values)
    assert state(spill) == before
