"""Transfers to a device with memory of its own: every bit arrives, whatever happens to the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from millpond.runtime import Limits, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.host_memory import host_view
from millpond.runtime.host_transfers import LANES, PIECE_BYTES, Transfers

BITS = {mx.float16: np.uint16, mx.bfloat16: np.uint16, mx.float32: np.uint32}


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    found = Transfers()
    yield found
    found.close()


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
def test_every_bit_pattern_arrives(transfers: Transfers, dtype: Any) -> None:
    """Zeros with a sign and NaNs with a payload, too."""
    unit = BITS[dtype]
    every = np.arange(1 << 16, dtype=np.uint32)
    bits = (every if unit is np.uint16 else every << 16 | 1).astype(unit).reshape(4, -1)
    moved = transfers.to_device(bits, dtype)
    assert (moved.dtype, moved.shape) == (dtype, bits.shape)
    mx.eval(moved)
    assert np.array_equal(host_view(moved).view(unit), bits)


def test_a_source_may_change_while_transfers_are_under_way(transfers: Transfers) -> None:
    source = np.zeros((2, 1000, 300), np.uint16)  # parts of a copy that do not come out even
    moved = []
    for number in range(3 * LANES):
        source[:] = number
        moved.append(transfers.to_device(source, mx.bfloat16))
    source[:] = 999
    for number, array in enumerate(moved):
        assert np.array_equal(host_view(array), np.full_like(source, number))


def test_what_was_moved_is_its_users_alone(transfers: Transfers) -> None:
    """A lane that serves again, or rows that are written to, change nothing else."""
    first = transfers.to_device(np.full((8,), 1, np.uint16), mx.float16)
    mx.eval(first)
    transfers.settle()
    host_view(first)[:] = 7
    others = [transfers.to_device(np.full((8,), 2, np.uint16), mx.float16) for _ in range(LANES)]
    mx.eval(others)
    assert host_view(first).tolist() == [7] * 8
    assert all(host_view(other).tolist() == [2] * 8 for other in others)


@pytest.mark.parametrize("elements", [1, PIECE_BYTES // 2, PIECE_BYTES // 2 + 1])
def test_sizes_around_a_lane(transfers: Transfers, elements: int) -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 16, elements, dtype=np.uint16)
    for _ in range(LANES + 1):
        moved = transfers.to_device(bits, mx.bfloat16)
        assert np.array_equal(host_view(moved), bits)


def test_a_lane_serves_widths_in_turn(transfers: Transfers) -> None:
    for number in range(3 * LANES):
        unit = np.uint16 if number % 2 else np.uint32
        dtype = mx.float16 if number % 2 else mx.float32
        bits = np.arange(number, number + 50, dtype=unit)
        assert np.array_equal(host_view(transfers.to_device(bits, dtype)).view(unit), bits)


@pytest.mark.parametrize("stem", ["gemma3-tiny-f32", "gemma4-moe-tiny-q4_0"])
@pytest.mark.anyio
async def test_warm_equals_cold_where_memory_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, shared_reference: Path, tmp_path: Path, stem: str
) -> None:
    """The way that a device with memory of its own takes, on a CPU."""
    model = shared_reference / "fixtures" / f"{stem}.gguf"
    draw = np.random.default_rng(5)
    prompts = [[2, *draw.integers(4, 500, size=tokens).tolist()] for tokens in (256, 512, 899)]
    sampling = SamplingParams(max_tokens=8, digest_logits=True, ignore_eos=True)

    async def answers(root: Path | None) -> list[Any]:
        limits = Limits(spill_slots=256, channel_messages=512)
        settings = RuntimeConfig(
            model=str(model), spill=root is not None, spill_root=root and str(root), limits=limits
        )
        async with open_runtime(settings) as runtime:
            found = [await runtime.generate(ids, sampling) for ids in prompts]
            await runtime.drain()
        return found

    cold = await answers(None)
    calls = []
    to_device = Transfers.to_device

    def counted(self: Transfers, rows: Any, dtype: Any) -> Any:
        calls.append(rows.nbytes)
        return to_device(self, rows, dtype)

    monkeypatch.setattr(Transfers, "to_device", counted)
    for module in ("millpond.runtime.kv.planes", "millpond.runtime.model"):
        monkeypatch.setattr(f"{module}.is_shared", lambda: False)
    first, warm = await answers(tmp_path), await answers(tmp_path)
    assert sum(calls) > 0
    for one, two, three in zip(cold, first, warm, strict=True):
        assert three.usage.cached_tokens == (three.usage.prompt_tokens - 1) // 256 * 256
        for other in (two, three):
            assert (other.token_ids, other.logits_xxh3) == (one.token_ids, one.logits_xxh3)
