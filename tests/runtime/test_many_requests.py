"""Many requests at once on a real house: each answer is the one that it gets alone, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.errors import ModelTooLarge, RequestFailed

pytestmark = pytest.mark.anyio
REQUESTS = 50
GRID = 16


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny(shared_reference: Path) -> Path:
    """Six layers, five of them with a window of 16 tokens."""
    return shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"


def config(model: Path, root: Path | None = None, **more: Any) -> RuntimeConfig:
    defaults: dict[str, Any] = {
        "model": str(model),
        "spill": root is not None,
        "spill_root": str(root) if root else None,
        "block_tokens": GRID,
        "prefill_chunk_tokens": GRID,
        "deterministic": True,
    }
    return RuntimeConfig(**defaults | more)


def ids(length: int, seed: int) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(4, 250, size=length - 1).tolist()]


@dataclass(frozen=True)
class Question:
    """A request, and after how many tokens its reader leaves, or -1."""

    prompt: list[int]
    sampling: SamplingParams
    leave: int


def questions(seed: int) -> list[Question]:
    """Prompts that begin alike, greedy and drawn; a third of them is left somewhere."""
    draw = random.Random(seed)
    stems = [ids(length, length) for length in (20, 48, 90)]
    found = []
    for number in range(REQUESTS):
        stem = draw.choice(stems)
        prompt = stem[: draw.randrange(1, len(stem) + 1)] + ids(draw.randrange(1, 40), number)
        sampling = SamplingParams(
            max_tokens=draw.randrange(1, 12),
            temperature=draw.choice((0.0, 0.0, 1.0)),
            seed=number,
            digest_logits=True,
            ignore_eos=True,
        )
        found.append(Question(prompt, sampling, draw.choice((-1, -1, 0, 1, 3))))
    return found


async def ask(runtime: Runtime, question: Question) -> tuple[Any, ...] | None:
    async with runtime.stream(question.prompt, question.sampling) as tokens:
        if question.leave == 0:
            return None
        async for token in tokens:
            if token.index + 1 == question.leave:
                return None
        done = await tokens.result()
    return done.token_ids, done.logits_xxh3


async def ask_together(runtime: Runtime, all_: Sequence[Question], seed: int) -> list[Any]:
    draw = random.Random(seed)
    found: list[Any] = [None] * len(all_)

    async def one(place: int) -> None:
        await anyio.sleep(draw.random() * 0.02)
        if draw.random() < 0.15:  # cancelled from outside, wherever it is
            with anyio.move_on_after(draw.random() * 0.2):
                found[place] = await ask(runtime, all_[place])
        else:
            found[place] = await ask(runtime, all_[place])

    async with anyio.create_task_group() as group:
        for place in range(len(all_)):
            group.start_soon(one, place)
    return found


async def alone(model: Path, all_: Sequence[Question]) -> list[Any]:
    """Each on a house that remembers nothing."""
    limits = Limits(held_max=0, sequences_max=1)
    async with open_runtime(config(model, limits=limits)) as runtime:
        found = []
        for question in all_:
            done = await runtime.generate(question.prompt, question.sampling, no_store=True)
            assert done.usage.cached_tokens == 0
            found.append((done.token_ids, done.logits_xxh3))
    return found


async def test_of_fifty_requests_with_random_cancellations_every_survivor_answers_as_alone(
    tiny: Path, tmp_path: Path
) -> None:
    all_ = questions(7)
    expected = await alone(tiny, all_)
    for root in (None, tmp_path):
        async with open_runtime(config(tiny, root)) as runtime:
            for seed in range(2):
                found = await ask_together(runtime, all_, seed)
                survivors = [place for place, one in enumerate(found) if one is not None]
                assert len(survivors) > REQUESTS / 4
                for place in survivors:
                    assert found[place] == expected[place], place
            await _until_quiet(runtime)
            figures = runtime.statistics()
            assert figures.engine.shared_tokens > 0
            assert figures.store.memory.claims == 0
            assert all(pool.lent == 0 for pool in figures.pools), "a slot did not come home"


async def _until_quiet(runtime: Runtime) -> None:
    await runtime.drain()
    while runtime.statistics().gateway.live or runtime.statistics().store.memory.claims:
        await anyio.sleep(0.01)


async def test_choices_of_one_prompt_read_it_once_and_differ_by_their_keys(tiny: Path) -> None:
    prompt = ids(40, 3)
    drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    async with open_runtime(config(tiny)) as runtime:
        found = await runtime.generate_choices(prompt, 4, drawn)
        assert runtime.statistics().engine.prefilled_tokens == 40
        assert [one.usage.cached_tokens for one in found] == [0, 40, 40, 40]
        assert [one.shared_tokens for one in found] == [0, 40, 40, 40]
        texts = {one.token_ids for one in found}
        assert len(texts) == 4
        again = await runtime.generate_choices(prompt, 4, drawn, salt="another")
        assert [one.token_ids for one in again] == [one.token_ids for one in found]
        single = await runtime.generate(prompt, drawn)
        assert single.token_ids == found[0].token_ids
        assert (await runtime.generate_choices(prompt, 1, drawn))[0].token_ids == single.token_ids
        async with runtime.stream_choices(prompt, 3, drawn) as streams:
            streams[1].leave()
            assert (await streams[2].result()).token_ids == found[2].token_ids
            with pytest.raises(RequestFailed, match="cancelled"):
                await streams[1].result()


async def test_a_following_turn_begins_live_and_reads_no_file(tiny: Path, tmp_path: Path) -> None:
    prompt = ids(50, 4)
    greedy = SamplingParams(max_tokens=9, digest_logits=True, ignore_eos=True)
    async with open_runtime(config(tiny, tmp_path)) as runtime:
        first = await runtime.generate(prompt, greedy)
        turn = [*prompt, *first.token_ids, *ids(9, 5)]
        second = await runtime.generate(turn, greedy)
        assert second.usage.cached_tokens == second.shared_tokens == 48
        assert (second.restore.blocks, second.restore.bytes) == (0, 0)
        figures = runtime.statistics().store
        assert figures.restored_blocks == 0
        assert figures.memory.held >= 1
        await runtime.drain()
    async with open_runtime(config(tiny, tmp_path)) as runtime:
        again = await runtime.generate(turn, greedy)
        assert again.restore.blocks > 0
        assert again.shared_tokens == 0
        assert again.logits_xxh3 == second.logits_xxh3


async def test_weights_beyond_their_budget_are_refused_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(ModelTooLarge, match="bytes of weights, expected at most 1000"):
        async with open_runtime(config(tiny, weight_bytes_max=1000)):
            raise AssertionError("it must not open")


def resident_pages() -> int:
    """Pages of this process in memory; skips where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not tell the resident size of a process")
    return int(statm.read_text().split()[1])


@pytest.mark.soak
@pytest.mark.parametrize("grid", [256, 16], ids=["spilling", "sharing"])
async def test_memory_is_flat_over_ten_thousand_short_requests(
    tiny: Path, tmp_path: Path, grid: int
) -> None:
    """With the small grid live caches are held and dropped; no root, whose index would grow."""
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    root = tmp_path if grid == 256 else None
    settings = config(tiny, root, block_tokens=grid, prefill_chunk_tokens=grid, deterministic=False)
    sizes = []
    async with open_runtime(settings) as runtime:
        for number in range(11_000):
            await runtime.generate(ids(5 + number % 30, number), greedy)
            if number >= 1000 and number % 1000 == 999:
                sizes.append(resident_pages())
    assert max(sizes) <= 1.01 * sizes[0], f"resident pages after each 1,000 requests: {sizes}"
