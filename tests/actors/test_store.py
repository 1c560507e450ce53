"""Restores: the store over real arrows, threads and a real disk; tests play gateway and engine."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from millpond.codecs.descriptors import KvDType
from millpond.codecs.fingerprint import chain_root
from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from store_bench import BLOCK, FINGERPRINT, FULL, GUARD, SLIDING, opened, prompt

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_new_process_restores_what_the_one_before_wrote(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        cold = await bench.run(prompt(33))
        assert cold.admit.prefix_tokens == 0
        assert cold.admit.restored.misses == {"absent": 1}
    async with opened(tmp_path) as bench:
        warm = await bench.run(prompt(33))
        assert warm.admit.prefix_tokens == 32
        report = warm.admit.restored
        assert report.misses == {}
        assert report.blocks == 8 + 2
        sizes = [bench.path(bench.submit(prompt(33)), FULL, 0).stat().st_size]
        sizes += [bench.path(bench.submit(prompt(33)), SLIDING, 7).stat().st_size]
        assert report.bytes == 8 * sizes[0] + 2 * sizes[1]
        assert bench.store.statistics().spilled_blocks == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 15, 16, 17, 20, 33, 40, 41])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 6, 8, 9, 11, 16, 100])
async def test_every_length_and_window_restores_the_whole_prefix(
    tmp_path: Path, length: int, window: int
) -> None:
    layout = KvLayout((SLIDING, FULL), BLOCK, BLOCK, window, 16)
    async with opened(tmp_path, layout=layout) as bench:
        await bench.run(prompt(length))
        warm = await bench.run(prompt(length))
    assert warm.admit.prefix_tokens == max(0, length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("groups", [(SLIDING,), (FULL,)], ids=["sliding", "full"])
async def test_models_with_one_kind_of_layers(
    tmp_path: Path, groups: tuple[LayerGroup, ...]
) -> None:
    only = LayerGroup(0, groups[0].layer_type, 1, 4, KvDType.F16, (0, 1))
    async with opened(tmp_path, layout=KvLayout((only,), BLOCK, BLOCK, 8, 16)) as bench:
        await bench.run(prompt(41))
        warm = await bench.run(prompt(41))
    assert warm.admit.prefix_tokens == 40


async def test_a_chunk_of_several_blocks_is_the_unit_of_a_hit(tmp_path: Path) -> None:
    layout = KvLayout((SLIDING, FULL), BLOCK, 2 * BLOCK, 6, 16)
    async with opened(tmp_path, layout=layout) as bench:
        await bench.run(prompt(31))
        warm = await bench.run(prompt(31))
    assert warm.admit.prefix_tokens == 24


async def test_a_prompt_that_parts_from_another_gets_its_branch_point(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(41))
        fork = [*prompt(24), *prompt(17, seed=7)]
        first = await bench.run(fork)
        assert first.admit.prefix_tokens == 16
        assert first.admit.restored.misses == {"incomplete_group": 1}
        other = [*prompt(24), *prompt(17, seed=8)]
        second = await bench.run(other)
        assert second.admit.prefix_tokens == 24
        assert second.admit.restored.misses == {"absent": 1}


async def test_one_flipped_bit_is_a_miss_and_the_file_goes_to_quarantine(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        submit = bench.submit(prompt(33))
        await bench.run(prompt(33))
        path = bench.path(submit, FULL, 5)
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        path.write_bytes(data)
        hit = await bench.run(prompt(33))
        assert hit.admit.prefix_tokens == 16  # sliding blocks are kept at 16 and 32
        assert hit.admit.restored.misses == {"corrupt": 1}
        (bad,) = (tmp_path / "quarantine").glob("*.safetensors")
        assert bad.name.endswith("-corrupt.safetensors")
        assert bad.read_bytes() == data
        assert "xxh3" in bad.with_suffix(".json").read_text()
        assert (await bench.run(prompt(33))).admit.prefix_tokens == 32


async def test_nothing_below_a_bad_block_stays_without_its_parent(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        submit = bench.submit(prompt(33))
        await bench.run(prompt(33))
        bench.path(submit, FULL, 2).write_bytes(b"")
        await bench.admit(bench.submit(prompt(33)))
        full = [path for path in bench.files() if FULL.name in str(path)]
        names = {path.name.partition(".")[0] for path in full}
        assert names == {one.hex() for one in submit.chain[:2]}


async def test_a_deleted_sliding_file_is_a_miss_at_that_boundary(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))
        bench.path(bench.submit(prompt(33)), SLIDING, 7).unlink()
        hit = await bench.run(prompt(33))
        assert hit.admit.prefix_tokens == 16
        assert hit.admit.restored.misses == {"incomplete_group": 1}
        assert 7 in hit.admit.sliding_blocks
    async with opened(tmp_path) as bench:
        assert (await bench.run(prompt(33))).admit.prefix_tokens == 32


async def test_a_block_of_another_guard_or_salt_is_never_a_hit(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))
        salted = chain_root(FINGERPRINT, GUARD, "exact", "tenant")
        hit = await bench.run(prompt(33), root=salted)
        assert hit.admit.prefix_tokens == 0
    async with opened(tmp_path, guard=b"h" * 32) as bench:
        hit = await bench.run(prompt(33))  # even under the same chain hashes
        assert hit.admit.prefix_tokens == 0
        assert hit.admit.restored.misses == {"mismatch": 2}  # at 32 and at 16


async def test_no_store_neither_reads_nor_writes(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        hit = await bench.run(prompt(33), no_store=True)
        assert not hit.admit.offers
        await bench.run(prompt(33))
        hit = await bench.run(prompt(33), no_store=True)
        assert hit.admit.prefix_tokens == 0
        assert hit.admit.restored.blocks == 0


async def test_without_a_root_everything_is_admitted_cold() -> None:
    async with opened(None) as bench:
        hit = await bench.run(prompt(33))
        assert (hit.admit.prefix_tokens, hit.admit.offers) == (0, False)
        assert hit.admit.restored.misses == {}
        await bench.offer(bench.submit(prompt(5)), FULL, 0)
        await bench.store.drain(10)
        assert bench.store.statistics().refusals == {"off": 1}


async def test_blocks_larger_than_a_slot_pass_in_parts(tmp_path: Path) -> None:
    async with opened(tmp_path, slot_bytes=FULL.plane_bytes(BLOCK)) as bench:
        await bench.run(prompt(33))
        path = bench.path(bench.submit(prompt(33)), SLIDING, 6)
        warm = await bench.run(prompt(33))
        assert warm.admit.prefix_tokens == 32
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        hit = await bench.run(prompt(33))
        assert hit.admit.prefix_tokens == 16
        assert hit.admit.restored.misses == {"corrupt": 1}


async def test_a_file_that_changes_between_two_passes_is_never_handed_on(tmp_path: Path) -> None:
    async with opened(tmp_path, slot_bytes=FULL.plane_bytes(BLOCK)) as bench:
        await bench.run(prompt(33))
        path = bench.path(bench.submit(prompt(33)), SLIDING, 7)
        size, reads = path.stat().st_size, itertools.count()

        def spoil(name: str) -> None:
            if name.endswith(path.name) and SLIDING.name in name and next(reads) == 4:
                data = bytearray(path.read_bytes())
                data[size - 1] ^= 1
                data[size - 200] ^= 1
                path.write_bytes(data)

        bench.root.disk.faults["read"] = spoil  # type: ignore[union-attr]
        hit = await bench.run(prompt(33))
        assert hit.admit.restored.misses == {"corrupt": 1}
        assert hit.admit.prefix_tokens == 16


async def test_the_attempts_are_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=Limits(restore_attempts_max=2)) as bench:
        await bench.run(prompt(65))
        for path in bench.files():
            path.write_bytes(path.read_bytes()[:-1])
        hit = await bench.run(prompt(65))
        assert hit.admit.prefix_tokens == 0
        assert hit.admit.restored.misses == {"corrupt": 2}


async def test_an_unreadable_block_is_a_miss_and_only_eio_moves_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))
        path = bench.path(bench.submit(prompt(33)), FULL, 4)
        for number, left in ((errno.EMFILE, True), (errno.EIO, False)):

            def fail(name: str, number: int = number) -> None:
                if name.endswith(path.name) and FULL.name in name:
                    raise OSError(number, os.strerror(number))

            bench.root.disk.faults["read"] = fail  # type: ignore[union-attr]
            hit = await bench.admit(bench.submit(prompt(33)))
            assert hit.admit.prefix_tokens == 16
            assert hit.admit.restored.misses == {"io_error": 1}
            assert path.exists() is left


async def test_a_pinned_prompt_is_not_evicted_until_it_is_unpinned(tmp_path: Path) -> None:
    async with opened(tmp_path, bytes_max=30_000) as bench:
        await bench.run(prompt(33))
        await bench.run(prompt(33), pin_s=3600.0)
        for seed in range(1, 12):
            await bench.run(prompt(33, seed))
        assert (await bench.run(prompt(33))).admit.prefix_tokens == 32
        figures = bench.store.statistics()
        assert (figures.pins, figures.pins_refused) == (1, 0)
        await bench.run(prompt(33), pin_s=0.0)
        for seed in range(12, 40):
            await bench.run(prompt(33, seed))
            await bench.run(prompt(33, seed))
        assert (await bench.run(prompt(33))).admit.prefix_tokens == 0


async def test_a_pin_that_takes_too_much_is_refused_and_said(tmp_path: Path) -> None:
    async with opened(tmp_path, bytes_max=16_000) as bench:
        await bench.run(prompt(33))
        warm = await bench.run(prompt(33), pin_s=3600.0)
        assert warm.admit.prefix_tokens == 32
        figures = bench.store.statistics()
        assert (figures.pins, figures.pins_refused) == (0, 1)
        assert "half of the budget" in figures.pin_problem
