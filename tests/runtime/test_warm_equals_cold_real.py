"""G1 on the real model: window 512, every length around a block, window and grid border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millpond.runtime import RuntimeConfig, SamplingParams, open_runtime

pytestmark = [pytest.mark.anyio, pytest.mark.real]
LENGTHS = (255, 256, 257, 511, 512, 513, 700, 1024, 1025, 2000)
SAMPLING = SamplingParams(max_tokens=4, digest_logits=True, ignore_eos=True)


def prompt(length: int) -> list[int]:
    ids = np.random.default_rng(length).integers(1000, 200_000, size=length).tolist()
    return [2, *ids[1:]]


async def answers(model: Path, root: Path, lengths: tuple[int, ...]) -> list[Any]:
    config = RuntimeConfig(model=str(model), spill_root=str(root))
    async with open_runtime(config) as runtime:
        found = [await runtime.generate(prompt(length), SAMPLING) for length in lengths]
        await runtime.drain()
        assert runtime.spill_report().refused == 0
        return found


async def check(model: Path, root: Path, lengths: tuple[int, ...]) -> None:
    cold = await answers(model, root, lengths)
    warm = await answers(model, root, lengths)
    for length, one, two in zip(lengths, cold, warm, strict=True):
        assert one.usage.cached_tokens == 0
        assert two.usage.cached_tokens == (length - 1) // 256 * 256
        assert two.token_ids == one.token_ids
        assert two.logits_xxh3 == one.logits_xxh3, "the logits differ in a bit"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_border_on_asyncio(real_model: Path, tmp_path: Path) -> None:
    await check(real_model, tmp_path, LENGTHS)


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_some_borders_on_trio(real_model: Path, tmp_path: Path) -> None:
    await check(real_model, tmp_path, (257, 513, 700))
