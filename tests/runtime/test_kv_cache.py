"""Live caches against the plainest oracle: row i of K is i + 1, of V its negative."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from millpond.runtime.kv.cache import (
    KEYS,
    VALUES,
    LinearCache,
    RowError,
    Rows,
    RowShape,
    WindowCache,
)

HEADS, DIM = 2, 3
SHAPE = RowShape(HEADS, DIM, mx.float32)
Cache = LinearCache | WindowCache


def rows(first: int, count: int, sign: int = 1) -> mx.array:
    """(1, heads, count, dim): position + 1 in every element, its head's index behind the point."""
    position = sign * (mx.arange(first, first + count) + 1.0)
    head = sign * mx.arange(HEADS) / 8
    return mx.broadcast_to(
        (position[None, :] + head[:, None])[None, :, :, None], (1, HEADS, count, DIM)
    )


def positions(array: mx.array, sign: int) -> list[int]:
    """The positions that rows say they are, once every head and element agrees."""
    found = sign * np.array(array)
    assert np.array_equal(
        found - np.arange(HEADS)[None, :, None, None] / 8,
        np.broadcast_to(found[:, :1, :, :1], found.shape),
    )
    return (found[0, 0, :, 0] - 1).astype(int).tolist()


def both(seen: Rows) -> list[int]:
    keys = positions(seen.keys, 1)
    assert positions(seen.values, -1) == keys
    return keys


def add(cache: Cache, count: int) -> list[int]:
    """Prefill the next tokens; return the positions that attention sees, in their order."""
    first = cache.length
    seen = cache.prefill(rows(first, count), rows(first, count, -1))
    assert cache.length == first + count
    assert seen.first == both(seen)[0]
    return both(seen)


def step(cache: Cache) -> list[int]:
    first = cache.length
    seen = both(cache.decode(rows(first, 1), rows(first, 1, -1)))
    assert cache.length == first + 1
    return seen


CUTS = ([1], [2, 1], [3, 3], [1, 1, 1, 1], [5], [4, 7], [16, 16, 3], [2, 9, 4])


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("tokens_max", [1, 12, 4096])
def test_a_full_layer_sees_every_row_in_order(cuts: Sequence[int], tokens_max: int) -> None:
    cache = LinearCache(SHAPE, tokens_max)
    for count in cuts:
        assert add(cache, count) == list(range(cache.length))
    for _ in range(3):
        assert step(cache) == list(range(cache.length))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 16, 40])
def test_a_window_sees_its_rows_and_the_chunk_in_order(cuts: Sequence[int], window: int) -> None:
    cache = WindowCache(SHAPE, window)
    for count in cuts:
        start = max(0, cache.length - (window - 1))
        assert add(cache, count) == list(range(start, cache.length))
    for _ in range(2 * window + 1):
        seen = step(cache)
        assert sorted(seen) == list(range(max(0, cache.length - window), cache.length))
        ring = [position % window for position in seen]
        assert ring == list(range(len(seen))), "the slot depends on the position alone"


def taken(cache: Cache, first: int, tokens: int) -> list[int]:
    keys = cache.take(KEYS, first, tokens)[None]
    assert positions(cache.take(VALUES, first, tokens)[None], -1) == positions(keys, 1)
    return positions(keys, 1)


def put(cache: Cache, first: int, tokens: int) -> None:
    cache.put(KEYS, first, rows(first, tokens)[0])
    cache.put(VALUES, first, rows(first, tokens, -1)[0])


@pytest.mark.parametrize("cache", [LinearCache(SHAPE, 64), WindowCache(SHAPE, 3)])
def test_every_block_of_the_last_chunk_can_be_taken(cache: Cache) -> None:
    add(cache, 8)
    add(cache, 8)
    assert [taken(cache, first, 4) for first in (8, 12)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    for first, tokens in ((13, 4), (16, 1), (-1, 2)):
        with pytest.raises(RowError, match="found rows"):
            cache.take(KEYS, first, tokens)


def test_rows_put_back_are_seen_as_if_computed() -> None:
    full, window = LinearCache(SHAPE, 64), WindowCache(SHAPE, 5)
    for first in (0, 4, 8):
        put(full, first, 4)
    for first in (4, 8):
        put(window, first, 4)
    assert add(full, 2) == list(range(14))
    assert add(window, 2) == list(range(8, 14))
    assert step(full) == list(range(15))
    assert sorted(step(window)) == list(range(10, 15))


@pytest.mark.parametrize("cache", [LinearCache(SHAPE, 64), WindowCache(SHAPE, 3)])
def test_rows_must_follow_those_that_are_there(cache: Cache) -> None:
    put(cache, 0, 4)
    for first in (0, 3, 5, 8):
        with pytest.raises(RowError, match="expected 4"):
            cache.put(KEYS, first, rows(first, 4)[0])
    assert cache.length == 4


def test_length_counts_rows_that_have_both_k_and_v() -> None:
    for cache in (LinearCache(SHAPE, 64), WindowCache(SHAPE, 3)):
        cache.put(KEYS, 0, rows(0, 4)[0])
        assert cache.length == 0
        cache.put(VALUES, 0, rows(0, 4, -1)[0])
        assert cache.length == 4


def test_a_ring_takes_no_more_chunks() -> None:
    cache = WindowCache(SHAPE, 4)
    add(cache, 6)
    step(cache)
    with pytest.raises(RowError, match="found a prefill"):
        add(cache, 2)
    with pytest.raises(RowError):
        put(cache, cache.length, 2)
    with pytest.raises(RowError):
        cache.take(KEYS, 4, 1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rows_are_rounded_before_any_attention_sees_them(dtype: mx.Dtype) -> None:
    value = mx.full((1, HEADS, 2, DIM), 1.0009765625 + 2**-13)
    for cache in (
        LinearCache(RowShape(HEADS, DIM, dtype), 64),
        WindowCache(RowShape(HEADS, DIM, dtype), 4),
    ):
        for seen in (cache.prefill(value, value), cache.decode(value[:, :, :1], value[:, :, :1])):
            assert seen.keys.dtype == seen.values.dtype == dtype
            assert mx.array_equal(seen.keys[:, :, :2], value[:, :, :2].astype(dtype))


def test_slots_that_nobody_wrote_are_zero() -> None:
    """A mask hides them, but NaN would poison the sum all the same."""
    cache = LinearCache(SHAPE, 4096)
    add(cache, 2)
    whole = np.array(cache.arrays()[0])
    assert whole.shape[2] > 2
    assert not whole[:, :, 2:].any()
