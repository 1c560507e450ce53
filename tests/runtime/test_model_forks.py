"""Forks, holds and twins on the real runner: whoever shares rows computes the same bits as alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from millpond.codecs.choices import SamplingParams
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.model import Model
from millpond.runtime.steps import (
    DecodeToken,
    Fork,
    Hold,
    PrefillChunk,
    Step,
    StepResult,
    Twin,
)
from millpond.runtime.testing.direct import load_direct

GREEDY = SamplingParams(digest_logits=True)
DRAWN = SamplingParams(digest_logits=True, temperature=1.5, seed=11)
BLOCK = CHUNK = 16
STEPS = 18  # more than the window has tokens
STEMS = ("gemma3-tiny-f32", "gemma4-ple-tiny-f32")
Answer = list[tuple[int, bytes]]


def prompt(length: int, seed: int = 1) -> list[int]:
    ids = np.random.default_rng(seed).integers(4, 250, size=length).tolist()
    return [2, *ids[1:]]


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


@dataclass
class Bench:
    model: Model

    def run(self, **parts: object) -> StepResult:
        found = self.model.run(Step(**parts))  # type: ignore[arg-type]
        assert found.failures == {}
        return found

    def chunk(self, who: int, ids: Sequence[int], first: int, *twins: Twin) -> PrefillChunk:
        end = min(len(ids), first + CHUNK)
        sample = GREEDY if end == len(ids) else None
        return PrefillChunk(who, first, packed(ids[first:end]), sample, 256, twins=twins)

    def prefill(self, who: int, ids: Sequence[int], first: int = 0, end: int = 1 << 30) -> Answer:
        """Run the chunks that begin before ``end``; the answer's first token, if it got that far."""
        found = StepResult()
        for start in range(first, min(end, len(ids)), CHUNK):
            found = self.run(prefills=(self.chunk(who, ids, start),))
        return [(one.token_id, one.logits_xxh3) for one in found.sampled]

    def decode(
        self, who: int, ids: Sequence[int], begun: Answer, sampling: SamplingParams = GREEDY
    ) -> Answer:
        answer = list(begun)
        for step in range(len(begun), STEPS):
            token = DecodeToken(who, len(ids) + step - 1, answer[-1][0], sampling, step)
            (one,) = self.run(decodes=(token,)).sampled
            answer.append((one.token_id, one.logits_xxh3))
        return answer

    def alone(self, ids: Sequence[int], who: int = 9) -> Answer:
        answer = self.decode(who, ids, self.prefill(who, ids))
        self.run(frees=(who,))
        return answer


@pytest.fixture(scope="module", params=STEMS)
def bench(request: pytest.FixtureRequest, shared_reference: Path) -> Bench:
    path = shared_reference / "fixtures" / f"{request.param}.gguf"
    config = RuntimeConfig(
        model=str(path),
        block_tokens=BLOCK,
        prefill_chunk_tokens=CHUNK,
        sliding_boundary_tokens=0,
    )
    return Bench(load_direct(path, config)[2])


@pytest.mark.parametrize("length", [65, 79])
def test_a_fork_at_any_boundary_answers_as_alone_and_so_does_its_source(
    bench: Bench, length: int
) -> None:
    whole, other = prompt(length), prompt(length + 9, seed=3)
    for boundary in (16, 32, 64):
        ids = whole[:boundary] + other[boundary:]
        expected = bench.alone(whole), bench.alone(ids)
        bench.prefill(1, whole, end=boundary)
        bench.run(forks=(Fork(1, 2, boundary, 256),))
        first = bench.prefill(1, whole, boundary)
        second = bench.prefill(2, ids, boundary)
        found = bench.decode(1, whole, first), bench.decode(2, ids, second)
        bench.run(frees=(1, 2))
        assert found == expected, boundary


def test_a_fork_of_a_sequence_that_decodes_begins_at_its_last_chunk(bench: Bench) -> None:
    for length in (33, 48, 60):
        ids = prompt(length, seed=length)
        boundary = (length - 1) // CHUNK * CHUNK
        expected = bench.alone(ids)
        answer = bench.decode(1, ids, bench.prefill(1, ids))
        bench.run(forks=(Fork(1, 2, boundary, 256),), frees=(1,))
        again = bench.decode(2, ids, bench.prefill(2, ids, boundary))
        bench.run(frees=(2,))
        assert answer == again == expected, length


def test_a_held_cache_serves_every_next_turn_without_a_change_of_a_bit(bench: Bench) -> None:
    for length in (33, 48, 60):
        first = prompt(length, seed=length)
        kept = length // CHUNK * CHUNK
        answer = bench.decode(1, first, bench.prefill(1, first))
        bench.run(holds=(Hold(1, kept),))
        turns = [
            first + [token for token, _ in answer] + prompt(9, seed=7),
            first[:kept] + prompt(3, seed=8),
        ]
        for ids in turns:
            bench.run(forks=(Fork(1, 3, kept, 256),))
            found = bench.decode(3, ids, bench.prefill(3, ids, kept))
            bench.run(frees=(3,))
            assert found == bench.alone(ids), length
        bench.run(frees=(1,))


def test_twins_share_the_whole_prompt_and_answer_as_alone(bench: Bench) -> None:
    for length in (5, 32, 40):
        ids = prompt(length, seed=length)
        expected = bench.alone(ids)
        last = (length - 1) // CHUNK * CHUNK
        bench.prefill(1, ids, end=last)
        twins = [Twin(2, GREEDY, 256), Twin(3, DRAWN, 256)]
        found = bench.run(prefills=(bench.chunk(1, ids, last, *twins),)).sampled
        assert [one.sequence_id for one in found] == [1, 2, 3]
        assert {one.logits_xxh3 for one in found} == {expected[0][1]}
        begun = {one.sequence_id: [(one.token_id, one.logits_xxh3)] for one in found}
        drawn = bench.decode(3, ids, begun[3], DRAWN)
        assert bench.decode(2, ids, begun[2]) == bench.decode(1, ids, begun[1]) == expected
        bench.run(frees=(1, 2, 3))
        begun = {4: [(one.token_id, one.logits_xxh3) for one in found[2:]]}
        bench.prefill(4, ids)
        assert bench.decode(4, ids, begun[4], DRAWN) == drawn
        bench.run(frees=(4,))


def test_a_fork_that_cannot_be_fails_its_target_only(bench: Bench) -> None:
    ids = prompt(40)
    expected = bench.alone(ids)
    answer = bench.decode(1, ids, bench.prefill(1, ids))
    forks = (Fork(1, 2, 41, 256), Fork(8, 3, 16, 256), Fork(1, 4, 0, 256))
    found = bench.model.run(Step(forks=forks, holds=(Hold(7, 16),)))
    assert set(found.failures) == {2, 3, 4, 7}
    assert all("RowError" in problem for problem in found.failures.values())
    assert answer == expected
    bench.run(frees=(1,))


def test_live_and_held_caches_take_no_more_than_the_layout_says(bench: Bench) -> None:
    """The numbers that admission counts with, against the arrays that there are."""
    layout = bench.model._layout

    def taken(who: int) -> int:
        arrays = {
            id(array): array.nbytes
            for cache in bench.model._caches[who].values()
            for array in [*cache.arrays(), *getattr(cache, "_rows", ())]
            if array is not None
        }
        return sum(arrays.values())

    for length in (5, 33, 48, 200):
        ids = prompt(length, seed=length)
        chunk = [
            replace(bench.chunk(1, ids, first), context_tokens=length + STEPS)
            for first in range(0, length, CHUNK)
        ]
        for one in chunk:
            found = bench.run(prefills=(one,))
            assert taken(1) <= layout.live_bytes(length + STEPS)
        bench.decode(1, ids, [(found.sampled[0].token_id, b"")])
        assert taken(1) <= layout.live_bytes(length + STEPS)
        if kept := length // CHUNK * CHUNK:
            bench.run(holds=(Hold(1, kept),))
            assert taken(1) <= layout.held_bytes(kept)
        bench.run(frees=(1,))
