"""Live caches: which rows attention sees, in which order, and the same bytes out as in."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.runtime.host_memory import host_view
from millpond.runtime.kv.cache import (
    FIRST_TOKENS,
    KEYS,
    VALUES,
    LinearCache,
    RowError,
    RowShape,
    WindowCache,
    live_caches,
)
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.kv.passes import DecodePass, PrefillPass

HEADS, DIM, WINDOW = 2, 3, 8
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
Cache = LinearCache | WindowCache


def shape_of(dtype: Any = mx.float32) -> RowShape:
    return RowShape(HEADS, DIM, dtype)


def window_cache() -> WindowCache:
    return WindowCache(shape_of(), WINDOW)


def linear_cache(tokens_max: int = 4096) -> LinearCache:
    return LinearCache(shape_of(), tokens_max)


def rows(first: int, count: int, which: int = KEYS) -> Any:
    """(1, heads, count, dim); every number tells K or V, head, position and element."""
    which_, head, token, dim = np.ix_(
        [which], range(HEADS), range(first, first + count), range(DIM)
    )
    return mx.array((which_ * 1e6 + head * 1e5 + token * 10 + dim).astype(np.float32))


def both(first: int, count: int) -> tuple[Any, Any]:
    return rows(first, count, KEYS), rows(first, count, VALUES)


def positions(found: Any) -> list[int]:
    """Positions of rows that ``rows`` made, from those of head 0, element 0 of K."""
    return [int(value) // 10 for value in np.array(found)[0, 0, :, 0]]


def is_same(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(np.array(found), np.array(expected)))


# -- full attention


def test_a_full_layer_sees_exactly_the_rows_in_use() -> None:
    cache = linear_cache()
    for first, count in ((0, 5), (5, 1), (6, FIRST_TOKENS), (6 + FIRST_TOKENS, 3)):
        seen = (
            cache.prefill(*both(first, count)) if count > 1 else cache.decode(*both(first, count))
        )
        assert is_same(seen.keys, rows(0, first + count))
        assert is_same(seen.values, rows(0, first + count, VALUES))
        assert (seen.first, cache.length) == (0, first + count)


@pytest.mark.parametrize("tokens_max", [1, 10, 1500, 1 << 20])
def test_the_most_that_was_expected_is_no_limit(tokens_max: int) -> None:
    cache = linear_cache(tokens_max)
    cache.prefill(*both(0, 1030))
    for position in range(1030, 1040):
        cache.decode(*both(position, 1))
    assert is_same(cache.take(KEYS, 0, 1040), rows(0, 1040)[0])


def test_rows_that_were_never_written_are_zero() -> None:
    cache = linear_cache()
    cache.prefill(*both(0, 3))
    (keys, values) = cache.arrays()
    assert not np.array(keys)[:, :, 3:].any()
    assert not np.array(values)[:, :, 3:].any()


# -- sliding window


@pytest.mark.parametrize("chunks", [(20,), (7, 7, 6), (8, 8, 4), (1,) * 20, (3, 17), (9, 1, 10)])
def test_a_chunk_sees_the_window_before_it_in_temporal_order(chunks: tuple[int, ...]) -> None:
    cache, done = window_cache(), 0
    for count in chunks:
        seen = cache.prefill(*both(done, count))
        first = max(0, done - (WINDOW - 1))
        done += count
        assert seen.first == first
        assert is_same(seen.keys, rows(first, done - first))
        assert is_same(seen.values, rows(first, done - first, VALUES))
        assert cache.length == done


@pytest.mark.parametrize("prompt", range(3 * WINDOW + 2))
def test_in_decode_a_row_lies_at_its_position_modulo_the_window(prompt: int) -> None:
    """Every residue of the prompt's end, two turns of the ring."""
    cache = window_cache()
    if prompt:
        cache.prefill(*both(0, prompt))
    for position in range(prompt, prompt + 2 * WINDOW + 1):
        seen = cache.decode(*both(position, 1))
        used = min(position + 1, WINDOW)
        last = range(position + 1 - used, position + 1)
        assert positions(seen.keys) == sorted(last, key=lambda at: at % WINDOW)
        assert is_same(np.array(seen.values) - np.array(seen.keys), np.full((1, 2, used, 3), 1e6))
        assert (seen.first, cache.length) == (-1, position + 1)


@pytest.mark.parametrize("end", range(WINDOW, 4 * WINDOW))
@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_a_window_that_was_restored_decodes_like_one_that_was_prefilled(
    end: int, block: int
) -> None:
    """Blocks smaller and larger than the window; the ring starts at every residue."""
    boundary = (end - 1) // block * block
    if not boundary:
        return
    cold, warm = window_cache(), window_cache()
    for first in range(0, boundary, block):
        cold.prefill(*both(first, block))
        if first + block > boundary - WINDOW:
            assert is_same(cold.take(KEYS, first, block), rows(first, block)[0])
            for which in (VALUES, KEYS):
                warm.put(which, first, rows(first, block, which)[0])
    for cache in (cold, warm):
        assert cache.length == boundary
    one, two = (cache.prefill(*both(boundary, end - boundary)) for cache in (cold, warm))
    assert is_same(one.keys, two.keys)
    assert is_same(one.values, two.values)
    for position in range(end, end + WINDOW + 1):
        one, two = (cache.decode(*both(position, 1)) for cache in (cold, warm))
        assert is_same(one.keys, two.keys)
        assert is_same(one.values, two.values)


def test_a_block_longer_than_the_window_can_be_taken_whole_after_its_chunk() -> None:
    cache = window_cache()
    cache.prefill(*both(0, 16))
    cache.prefill(*both(16, 32))
    for first in (16, 32):
        assert is_same(cache.take(VALUES, first, 16), rows(first, 16, VALUES)[0])
    assert is_same(cache.take(KEYS, 16 - (WINDOW - 1), 5), rows(16 - (WINDOW - 1), 5)[0])


# -- rows that do not continue what is there


@pytest.mark.parametrize("first", [0, 3, 5, -1])
@pytest.mark.parametrize("make", [linear_cache, window_cache])
def test_rows_that_leave_a_gap_or_overlap_are_refused_and_nothing_changes(
    make: Any, first: int
) -> None:
    cache: Cache = make()
    for which in (KEYS, VALUES):
        cache.put(which, 0, rows(0, 4, which)[0])
    with pytest.raises(RowError, match=f"found rows from {first} on, expected 4"):
        cache.put(VALUES, first, rows(0, 4, VALUES)[0])
    assert cache.length == 4
    for which in (KEYS, VALUES):
        assert is_same(cache.take(which, 0, 4), rows(0, 4, which)[0])


@pytest.mark.parametrize("make", [linear_cache, window_cache])
def test_rows_of_keys_alone_are_no_tokens(make: Any) -> None:
    cache: Cache = make()
    cache.put(KEYS, 0, rows(0, 4)[0])
    assert cache.length == 0
    cache.put(VALUES, 0, rows(0, 4, VALUES)[0])
    assert cache.length == 4


@pytest.mark.parametrize(("first", "tokens"), [(-1, 2), (0, 5), (4, 1), (100, 4)])
@pytest.mark.parametrize("make", [linear_cache, window_cache])
def test_rows_that_are_not_there_cannot_be_taken(make: Any, first: int, tokens: int) -> None:
    cache: Cache = make()
    with pytest.raises(RowError):
        cache.take(KEYS, 0, 1)
    cache.prefill(*both(0, 4))
    with pytest.raises(RowError, match=rf"found rows 0 to 4, expected {first} to {first + tokens}"):
        cache.take(KEYS, first, tokens)


def test_rows_that_left_the_window_cannot_be_taken() -> None:
    cache = window_cache()
    cache.prefill(*both(0, 12))
    cache.prefill(*both(12, 4))
    with pytest.raises(RowError, match="found rows 5 to 16, expected 4 to 8"):
        cache.take(KEYS, 4, 4)


def test_a_ring_takes_no_chunk_and_gives_no_block() -> None:
    cache = window_cache()
    cache.prefill(*both(0, 12))
    seen = cache.decode(*both(12, 1))
    for call in (
        lambda: cache.prefill(*both(13, 2)),
        lambda: cache.put(KEYS, 13, rows(13, 4)[0]),
        lambda: cache.take(KEYS, 8, 4),
    ):
        with pytest.raises(RowError):
            call()
    assert cache.length == 13
    assert positions(seen.keys) == [8, 9, 10, 11, 12, 5, 6, 7]


def test_a_restored_tail_shorter_than_the_window_is_refused_by_the_next_chunk() -> None:
    cache = window_cache()
    for which in (KEYS, VALUES):
        cache.put(which, 96, rows(96, 4, which)[0])
    with pytest.raises(RowError, match="found rows 96 to 100, expected the last 7"):
        cache.prefill(*both(100, 4))


# -- bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [LinearCache, WindowCache])
def test_rows_come_back_byte_for_byte(kind: type[Cache], dtype: Any) -> None:
    """Random bits: infinities, NaNs and subnormal numbers are bytes like any other."""
    source, tokens = np.random.default_rng(3), 16
    bits = np.uint32 if dtype == mx.float32 else np.uint16
    cache = kind(shape_of(dtype), 1024)
    blocks = source.integers(0, np.iinfo(bits).max, (3, 2, HEADS, tokens, DIM)).astype(bits)
    blocks[0, 0, 0, 0] = [0, 1, np.iinfo(bits).max]
    for index, block in enumerate(blocks):
        for which in (KEYS, VALUES):
            cache.put(which, index * tokens, mx.array(block[which]).view(dtype))
    for index, block in enumerate(blocks):
        for which in (KEYS, VALUES):
            found = mx.contiguous(cache.take(which, index * tokens, tokens))
            unsigned = mx.uint32 if dtype == mx.float32 else mx.uint16
            assert np.array_equal(np.array(found.view(unsigned)), block[which])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [LinearCache, WindowCache])
def test_attention_sees_rows_as_they_are_stored(kind: type[Cache], dtype: Any) -> None:
    """A chunk attends to its own rows after rounding, so that a restore changes nothing."""
    cache = kind(shape_of(dtype), 64)
    keys = mx.array(np.random.default_rng(5).standard_normal((1, HEADS, 6, DIM)).astype(np.float32))
    seen = cache.prefill(keys, keys)
    assert seen.keys.dtype == seen.values.dtype == dtype
    assert is_same(seen.keys.astype(mx.float32), keys.astype(dtype).astype(mx.float32))
    assert cache.decode(keys[:, :, :1], keys[:, :, :1]).keys.dtype == dtype


# -- caches of a model


def layout() -> KvLayout:
    groups = (
        LayerGroup(0, LayerType.SLIDING, HEADS, DIM, KvDType.F16, (0, 1)),
        LayerGroup(1, LayerType.FULL, 1, 4, KvDType.F16, (2,)),
    )
    return KvLayout(groups, 4, 4, WINDOW, 0)


def test_each_layer_that_owns_rows_gets_the_cache_of_its_kind() -> None:
    caches = live_caches(layout(), 100)
    assert {layer: type(cache) for layer, cache in caches.items()} == {
        0: WindowCache,
        1: WindowCache,
        2: LinearCache,
    }
    assert [array for cache in caches.values() for array in cache.arrays()] == []


def test_a_layer_that_shares_sees_what_its_source_saw_in_this_pass() -> None:
    caches = live_caches(layout(), 100)
    chunk = PrefillPass(caches)
    added = chunk.add(1, *both(0, 12))
    assert chunk.shared(1) is added
    with pytest.raises(KeyError):
        PrefillPass(caches).shared(1)
    step = DecodePass(caches)
    assert step.add(1, *both(12, 1)).first == -1
    assert positions(step.shared(1).keys) == [8, 9, 10, 11, 12, 5, 6, 7]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("at_once", [0, 24, 3000])
def test_rows_from_host_memory_equal_rows_that_were_put(dtype: Any, at_once: int) -> None:
    shape = RowShape(2, 8, dtype)
    put, copied = LinearCache(shape, 4000), LinearCache(shape, 4000, at_once)
    for block in range(5):
        rows = mx.random.normal((2, 700, 8)).astype(dtype)
        mx.eval(rows)
        for which in (KEYS, VALUES):
            put.put(which, 700 * block, rows)
            copied.put_host(which, 700 * block, host_view(rows))
    more = mx.random.normal((1, 2, 1, 8)).astype(dtype)
    for one, other in zip(put.decode(more, more).keys, copied.decode(more, more).keys, strict=True):
        assert mx.array_equal(one, other)
    assert mx.array_equal(put.take(VALUES, 0, 3500), copied.take(VALUES, 0, 3500))
    with pytest.raises(RowError, match="expected 3501"):
        copied.put_host(KEYS, 3500, host_view(more)[0])
