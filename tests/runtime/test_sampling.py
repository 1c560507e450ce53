"""From logits to a token: which ids may come, how often, and always the same ones for a seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
import xxhash
from millpond.codecs.choices import SamplingParams
from millpond.runtime.sampling import Draw, History, Sampler, adjusted, choose, logprob_of

PROBABILITIES = (0.02, 0.4, 0.1, 0.25, 0.03, 0.2)
RANKED = (1, 3, 5, 2, 4, 0)  # best first
DRAWS = 400


def logits_of(*probabilities: float) -> Any:
    return mx.array(np.log(np.array(probabilities, np.float64)).astype(np.float32))


def drawn(logits: Any, sampling: SamplingParams, count: int = DRAWS, seed: int = 5) -> Counter[int]:
    ids = mx.stack([choose(logits, sampling, seed, step) for step in range(count)])
    return Counter(np.array(ids).tolist())


def drawn_by(sampling: SamplingParams, sequence_id: int = 1, steps: int = 20) -> list[int]:
    sampler, logits = Sampler(()), logits_of(*PROBABILITIES)
    draws = [Draw(sequence_id, sampling, step) for step in range(steps)]
    return [sampler.sample(draw, logits, []).token_id for draw in draws]


# -- which ids may come


def test_temperature_zero_takes_the_best_and_the_first_of_equals() -> None:
    assert drawn(logits_of(*PROBABILITIES), SamplingParams(), 3) == {1: 3}
    assert drawn(logits_of(0.2, 0.4, 0.4), SamplingParams(seed=3, top_k=1), 3) == {1: 3}


def test_all_ids_come_as_often_as_they_are_probable() -> None:
    found = drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=1.0), 4000)
    for token_id, probability in enumerate(PROBABILITIES):
        spread = (4000 * probability * (1 - probability)) ** 0.5
        assert abs(found[token_id] - 4000 * probability) < 4 * spread


def test_a_low_temperature_sharpens_and_a_high_one_levels() -> None:
    cold, even, hot = (
        drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=t))[1]
        for t in (0.25, 1.0, 50.0)
    )
    assert cold > 0.75 * DRAWS > even > hot
    assert hot < DRAWS / 3


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-40, 1e-46, 5e-324])
def test_however_small_the_temperature_the_best_comes(temperature: float) -> None:
    """Logits once overflowed to infinities that were all alike, and id 0 came."""
    logits = mx.array([1.0, 2.0, 9.0, 3.0, 8.9])
    assert drawn(logits, SamplingParams(temperature=temperature), 5) == {2: 5}


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 2**40])
def test_top_k_keeps_the_k_most_probable(count: int) -> None:
    found = drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=2.0, top_k=count))
    assert set(found) == set(RANKED[:count])


@pytest.mark.parametrize(
    ("mass", "kept"), [(1e-9, 1), (0.39, 1), (0.41, 2), (0.64, 2), (0.66, 3), (0.94, 4), (1.0, 6)]
)
def test_top_p_keeps_the_smallest_set_with_that_mass(mass: float, kept: int) -> None:
    found = drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=1.0, top_p=mass), 800)
    assert set(found) == set(RANKED[:kept])


@pytest.mark.parametrize(
    ("share", "kept"), [(1.0, 1), (0.63, 1), (0.62, 2), (0.49, 3), (0.24, 4), (0.0, 6)]
)
def test_min_p_keeps_those_with_a_share_of_the_best(share: float, kept: int) -> None:
    found = drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=1.0, min_p=share), 800)
    assert set(found) == set(RANKED[:kept])


def test_the_filters_look_at_probabilities_after_temperature() -> None:
    """At temperature 1/2 probabilities are squared: 0.16 of 0.28 is more than half."""
    found = drawn(logits_of(*PROBABILITIES), SamplingParams(temperature=0.5, top_p=0.5))
    assert set(found) == {1}


def test_together_the_filters_keep_what_each_of_them_keeps() -> None:
    sampling = SamplingParams(temperature=1.0, top_k=3, top_p=0.99, min_p=0.55)
    assert set(drawn(logits_of(*PROBABILITIES), sampling)) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_infinite_logit_wins_and_an_impossible_id_never_comes(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    assert drawn(mx.array([1.0, mx.inf, 2.0]), sampling, 20) == {1: 20}
    assert 1 not in drawn(mx.array([1.0, -mx.inf, 1.1]), sampling, 100)


# -- seeds


def test_a_draw_depends_on_seed_and_step_alone() -> None:
    sampling = SamplingParams(temperature=1.0, seed=7)
    first = drawn_by(sampling)
    assert drawn_by(sampling) == first
    assert drawn_by(sampling, sequence_id=99) == first
    mx.random.seed(1)
    assert drawn_by(sampling) == first, "MLX's own random state plays no part"
    assert drawn_by(SamplingParams(temperature=1.0, seed=8)) != first
    sampler = Sampler(())
    backwards = [
        sampler.sample(Draw(1, sampling, step), logits_of(*PROBABILITIES), []).token_id
        for step in reversed(range(20))
    ]
    assert backwards[::-1] == first


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_any_seed_is_a_seed_of_its_own(seed: int) -> None:
    found = drawn_by(SamplingParams(temperature=1.0, seed=seed), steps=60)
    others = [
        drawn_by(SamplingParams(temperature=1.0, seed=s), steps=60) for s in (3, 2**31, 2**62)
    ]
    assert all(found != other for other in others)


def test_steps_of_near_seeds_do_not_repeat_each_other() -> None:
    """With keys of seed + step, seed 1 would give what seed 0 gives one step later."""
    texts = [drawn_by(SamplingParams(temperature=1.0, seed=seed), steps=40) for seed in range(4)]
    for one, other in pairwise(texts):
        assert one[1:] != other[:-1]
        assert one[:-1] != other[1:]


def test_choices_of_one_seed_draw_apart_and_none_is_that_of_a_near_seed() -> None:
    def choice(number: int, seed: int = 3) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed, choice=number)
        return drawn_by(sampling, steps=40)

    found = [choice(number) for number in (0, 1, 2, 1023)]
    others = [choice(0, seed) for seed in (4, 5, 3 + 1023)]
    assert len({tuple(one) for one in found + others}) == len(found + others)
    assert choice(2) == found[2]
    assert found[0] == drawn_by(SamplingParams(temperature=1.0, seed=3), steps=40)


def test_without_a_seed_requests_draw_their_own_and_keep_it() -> None:
    sampling = SamplingParams(temperature=1.0)
    sampler, logits = Sampler(()), logits_of(*PROBABILITIES)
    texts = [
        [sampler.sample(Draw(number, sampling, step), logits, []).token_id for step in range(40)]
        for number in (1, 2)
    ]
    assert texts[0] != texts[1]
    again = sampler.sample(Draw(1, sampling, 7), logits, []).token_id
    assert again == texts[0][7]
    sampler.forget(1)
    fresh = [sampler.sample(Draw(1, sampling, s), logits, []).token_id for s in range(40)]
    assert fresh != texts[0]


# -- penalties, bias, what is suppressed


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_the_rest() -> None:
    logits = mx.array([2.0, -2.0, 3.0, 0.0, 1.0])
    history = History(frozenset({0, 1, 900}), Counter({3: 2, 4: 1}))
    found = adjusted(logits, SamplingParams(repetition_penalty=2.0), history)
    assert np.array(found).tolist() == [1.0, -4.0, 3.0, 0.0, 0.5]
    assert np.array(logits).tolist() == [2.0, -2.0, 3.0, 0.0, 1.0], "the raw ones stay"


def test_presence_counts_once_and_frequency_each_time_of_the_completion_alone() -> None:
    history = History(frozenset({2}), Counter({0: 3, 1: 1}))
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = adjusted(mx.zeros(4), sampling, history)
    assert np.array(found).tolist() == [-1.25, -0.75, 0.0, 0.0]


def test_a_bias_is_added_and_one_beyond_the_vocabulary_is_nobody() -> None:
    sampling = SamplingParams(logit_bias={2: 5.0, 0: -1.0, 77: 100.0})
    assert np.array(adjusted(mx.zeros(3), sampling, History())).tolist() == [-1.0, 0.0, 5.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 100.5])
def test_a_bias_out_of_its_range_is_no_valid_request(value: float) -> None:
    data = msgspec.msgpack.encode(SamplingParams(logit_bias={3: value}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=SamplingParams)


def test_the_sampler_remembers_what_was_chosen_until_the_sequence_is_forgotten() -> None:
    sampler, sampling = Sampler(()), SamplingParams(frequency_penalty=1.0)
    logits = mx.array([1.0, 2.5, 2.0])
    tokens = [sampler.sample(Draw(1, sampling, step), logits, []).token_id for step in range(5)]
    assert tokens == [1, 2, 1, 0, 2]
    assert sampler.sample(Draw(2, sampling, 1), logits, []).token_id == 1, "each has its own"
    sampler.forget(1)
    assert sampler.sample(Draw(1, sampling, 1), logits, []).token_id == 1


def test_the_prompt_counts_for_the_repetition_penalty() -> None:
    sampling = SamplingParams(repetition_penalty=2.0)
    prompt = np.array([1, 1, 0], "<u4").tobytes()
    found = Sampler(()).sample(Draw(1, sampling, 0, prompt), mx.array([1.0, 2.5, 2.0]), [])
    assert found.token_id == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_suppressed_id_never_comes_whatever_its_bias(temperature: float) -> None:
    sampler = Sampler((1, 3))
    sampling = SamplingParams(temperature=temperature, logit_bias={1: 100.0}, seed=2)
    logits = logits_of(*PROBABILITIES)
    found = {sampler.sample(Draw(1, sampling, step), logits, []).token_id for step in range(50)}
    assert not found & {1, 3}


# -- what is told about a choice


def test_the_digest_is_of_the_raw_logits() -> None:
    logits = logits_of(*PROBABILITIES)
    expected = xxhash.xxh3_128_digest(np.array(logits).tobytes())
    for sampling in (
        SamplingParams(digest_logits=True),
        SamplingParams(digest_logits=True, temperature=1.0, top_k=2, logit_bias={0: 9.0}),
    ):
        assert Sampler((2,)).sample(Draw(1, sampling, 0), logits, []).logits_xxh3 == expected
    assert Sampler(()).sample(Draw(1, SamplingParams(), 0), logits, []).logits_xxh3 == b""


@pytest.mark.parametrize("count", [0, 1, 3, 6, 20])
def test_log_probabilities_are_those_of_the_model_best_first(count: int) -> None:
    found = logprob_of(logits_of(*PROBABILITIES) + 7.0, 3, count)
    assert found.logprob == pytest.approx(np.log(0.25), abs=1e-6)
    assert [token_id for token_id, _ in found.top] == list(RANKED[:count])
    for token_id, value in found.top:
        assert value == pytest.approx(np.log(PROBABILITIES[token_id]), abs=1e-6)


def test_log_probabilities_are_told_where_they_were_asked_for() -> None:
    logits = logits_of(*PROBABILITIES)
    told = Sampler(()).sample(Draw(1, SamplingParams(logprobs=2), 0), logits, []).logprob
    assert told is not None
    assert [token_id for token_id, _ in told.top] == [1, 3]
    assert Sampler(()).sample(Draw(1, SamplingParams(), 0), logits, []).logprob is None


def test_infinite_logits_have_log_probabilities_too() -> None:
    """A regression: a tiny repetition penalty makes infinite logits, whose differences are none."""
    sampling = SamplingParams(repetition_penalty=1e-45, logprobs=3)
    sampled = Sampler(()).sample(
        Draw(1, sampling, 0, b"\0\0\0\0\1\0\0\0"), mx.array([2.0, 3.0, 1.0]), []
    )
    told = sampled.logprob
    assert told is not None and np.isfinite(told.logprob)
    assert np.isfinite([value for _, value in told.top]).all()
