"""Decoding in place, with a stand-in on the CPU for the kernels: same tokens, whatever is begun ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from millpond.codecs.descriptors import LayerType
from millpond.runtime.kv.cache import LinearCache, RowError, RowShape, WindowCache
from millpond.runtime.kv.passes import DecodePass
from millpond.runtime.model_decode import InPlaceSteps
from millpond.runtime.testing.tiny_model import tiny_gemma3
from model_bench import Bench, prompt, token


class OnHost:
    """Rows written through views of the buffers, as a kernel would, by the family's own forward pass."""

    def __init__(self, bench: Bench) -> None:
        self._family, self._config = bench.model._family, bench.model._config
        self.steps = 0

    def __call__(
        self, token_ids: Any, positions: Any, rows: Sequence[Sequence[Any]]
    ) -> tuple[Any, Any]:
        self.steps += 1
        each = zip(token_ids.tolist(), positions.tolist(), rows, strict=True)
        logits = mx.concatenate([self._one(*one) for one in each], axis=0)
        return logits, mx.argmax(logits, axis=-1)

    def _one(self, token_id: int, position: int, rows: Sequence[Any]) -> Any:
        caches: dict[int, Any] = {}
        for index, layer in enumerate(self._config.layers):
            keys, values = rows[2 * index], rows[2 * index + 1]
            shape = RowShape(keys.shape[1], keys.shape[3], keys.dtype)
            if layer.kind is LayerType.FULL:
                caches[index] = LinearCache(shape, keys.shape[2])
                caches[index]._buffers = [mx.array(keys), mx.array(values)]
                caches[index]._lengths = [position, position]
            else:
                caches[index] = WindowCache(shape, keys.shape[2])
                caches[index]._ring = [mx.array(keys), mx.array(values)]
                caches[index]._length = position
        hidden = self._family.forward(
            mx.array([token_id], dtype=mx.uint32), DecodePass(caches), position
        )
        logits = self._family.logits(hidden)
        mx.eval(logits)
        for index, cache in caches.items():
            for which, array in enumerate(cache.arrays()):
                slot = position % array.shape[2]
                view = np.array(rows[2 * index + which], copy=False)
                view[:, :, slot] = np.array(array[:, :, slot])
        return logits


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("decode") / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    return Bench.load(path)


def in_place(plain: Bench) -> tuple[Bench, OnHost]:
    found = plain.decoding_together(8)
    kernels = OnHost(plain)
    found.model._in_place = InPlaceSteps(kernels)
    return found, kernels


@pytest.mark.parametrize("length", [5, 299, 300, 301, 600, 700])
def test_steps_in_place_give_the_same_bits_as_plain_ones(plain: Bench, length: int) -> None:
    found, _ = in_place(plain)
    ids = prompt(length, 3)
    ids = [one % 280 for one in ids]
    expected = plain.decode(plain.cold(ids)[0], length, 8)
    assert found.decode(found.cold(ids)[0], length, 8) == expected


def test_a_step_that_was_begun_is_not_run_again(plain: Bench) -> None:
    found, kernels = in_place(plain)
    found.decode(found.cold([5, 6, 7])[0], 3, 6)
    assert kernels.steps == 7  # the last one begun for nothing


def test_what_was_begun_on_another_token_is_dropped(plain: Bench) -> None:
    found, _ = in_place(plain)
    first = found.cold([5, 6, 7])[0]
    found.decode(first, 3, 1)
    other = plain.cold([5, 6, 7])[0]
    plain.decode(other, 3, 1)
    wrong = token(first, 4, 2)  # not the token that was chosen for this place
    assert found.good(decodes=(wrong,)).sampled == plain.good(decodes=(wrong,)).sampled


def test_sequences_together_are_the_same_as_each_alone(plain: Bench) -> None:
    found, _ = in_place(plain)
    ids = {1: [5, 6, 7], 2: [one % 280 for one in prompt(350, 4)]}
    alone = {name: plain.decode(plain.cold(one)[0], len(one), 3) for name, one in ids.items()}
    last = {name: found.cold(one, name)[0] for name, one in ids.items()}
    for step in range(1, 4):
        tokens = tuple(token(last[n], len(ids[n]) + step - 1, step, n) for n in ids)
        for sampled in found.good(decodes=tokens).sampled:
            last[sampled.sequence_id] = sampled
            expected = alone[sampled.sequence_id][step - 1]
            assert (sampled.token_id, sampled.logits_xxh3) == (
                expected.token_id,
                expected.logits_xxh3,
            )


def test_a_buffer_grows_by_few_sizes_and_keeps_its_rows() -> None:
    cache = LinearCache(RowShape(1, 2, mx.float32), 10**6)
    rows = mx.arange(2 * 1000).reshape(1, 1, 1000, 2).astype(mx.float32)
    cache.prefill(rows, rows)
    sizes = set()
    for tokens in range(1001, 5000, 7):
        keys, _ = cache.in_place(tokens)
        sizes.add(keys.shape[2])
    assert sizes == {1024, 1536, 2048, 3072, 4096, 6144}
    assert mx.array_equal(keys[:, :, :1000], rows)


def test_no_row_is_written_over_one_that_is_there() -> None:
    for cache in (
        LinearCache(RowShape(1, 2, mx.float32), 64),
        WindowCache(RowShape(1, 2, mx.float32), 8),
    ):
        rows = mx.ones((1, 1, 5, 2))
        cache.prefill(rows, rows)
        with pytest.raises(RowError, match="expected fewer than 5"):
            cache.in_place(5)


def test_a_ring_in_place_is_not_the_memory_of_the_rows_it_was_made_of() -> None:
    cache = WindowCache(RowShape(1, 2, mx.float32), 4)
    rows = mx.ones((1, 1, 4, 2))
    cache.prefill(rows, rows)
    keys, values = cache.in_place(5)
    mx.eval(keys, values)
    np.array(keys, copy=False)[...] = 7
    assert mx.array_equal(cache.fork(4, 8).take(0, 0, 4), mx.ones((1, 4, 2)))
