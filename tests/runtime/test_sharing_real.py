"""Live caches on the real model: window 512, rows shared in flight, over a turn and among choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams, open_runtime

pytestmark = [pytest.mark.anyio, pytest.mark.real]
SAMPLING = SamplingParams(max_tokens=4, digest_logits=True, ignore_eos=True)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 200_000, size=length).tolist()


def told(one: Any) -> tuple[Any, ...]:
    return one.token_ids, one.logits_xxh3


async def together(runtime: Runtime, prompts: list[list[int]]) -> list[Any]:
    found: dict[int, Any] = {}

    async def one(place: int) -> None:
        found[place] = await runtime.generate(prompts[place], SAMPLING)

    async with anyio.create_task_group() as group:
        for place in range(len(prompts)):
            group.start_soon(one, place)
    return [found[place] for place in range(len(prompts))]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_shared_rows_change_no_bit(real_model: Path) -> None:
    stem = [2, *ids(799, 1)]
    prompts = [stem, [*stem[:700], *ids(50, 2)], [*stem, *ids(5, 3)]]
    turn = [*stem, *ids(30, 4)]
    config = RuntimeConfig(model=str(real_model), spill=False, deterministic=True)
    config_alone = RuntimeConfig(
        model=str(real_model), spill=False, deterministic=True, limits=Limits(held_max=0)
    )
    async with open_runtime(config_alone) as runtime:
        alone = [await runtime.generate(one, SAMPLING) for one in [*prompts, turn]]
        assert all(one.usage.cached_tokens == 0 for one in alone)
    async with open_runtime(config) as runtime:
        found = await together(runtime, prompts)
        assert [told(one) for one in found] == [told(one) for one in alone[:3]]
        assert sorted(one.shared_tokens for one in found) == [0, 512, 768]
        after = await runtime.generate(turn, SAMPLING)
        assert after.usage.cached_tokens == 768
        assert told(after) == told(alone[3])
        choices = await runtime.generate_choices(turn, 3, SAMPLING)
        assert {told(one) for one in choices} == {told(alone[3])}
        assert [one.shared_tokens for one in choices] == [768, len(turn), len(turn)]
