"""Spilling, budget, order and cancellation in the store, over real arrows and a real disk."""

from __future__ import annotations

import errno
import itertools
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import xxhash
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Held,
    Restore,
    Snapshot,
)
from millpond.runtime.config import Limits
from store_bench import BLOCK, FULL, ROOT, SLIDING, Bench, opened, prompt

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chain_hash": b"x" * 32}, "name"),
        ({"parent": b"x" * 32}, "name"),
        ({"token_ids": b"\0" * 4 * (BLOCK + 1)}, "shape"),
        ({"token_ids": b"\0" * 4 * (BLOCK - 1)}, "shape"),
        ({"first_token": 3}, "shape"),
        ({"planes": 1}, "shape"),
        ({"first_plane": 1}, "shape"),
        ({"payload_bytes": 255}, "shape"),
        ({"group": 9}, "shape"),
        ({"payload_xxh3": b"x" * 16}, "damaged"),
    ],
)
async def test_an_offer_that_is_not_what_it_says_is_refused_and_counted(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    async with opened(tmp_path) as bench:
        await bench.offer(bench.submit(prompt(9)), FULL, 0, **changes)
        await bench.store.drain(10)
        assert bench.store.statistics().refusals == {reason: 1}
        assert bench.files() == []


async def test_a_full_block_without_its_parent_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        submit = bench.submit(prompt(9))
        await bench.offer(submit, FULL, 1)
        await bench.offer(submit, SLIDING, 1)
        await bench.store.drain(10)
        assert bench.store.statistics().refusals == {"parent": 1}
        assert len(bench.files()) == 1


async def test_a_block_offered_twice_is_written_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        submit = bench.submit(prompt(9))
        await bench.offer(submit, FULL, 0)
        await bench.offer(submit, FULL, 0)
        await bench.store.drain(10)
        figures = bench.store.statistics()
        assert (figures.spilled_blocks, figures.duplicates, figures.refused) == (1, 1, 0)


async def test_half_a_block_is_refused_and_its_slots_come_home(tmp_path: Path) -> None:
    async with opened(tmp_path, slot_bytes=FULL.plane_bytes(BLOCK)) as bench:
        submit = bench.submit(prompt(9))
        lease = await bench.spill_pool.lend(128)
        half = Snapshot(
            request_id=0,
            group=0,
            first_token=0,
            chain_hash=submit.chain[0],
            parent=ROOT,
            token_ids=submit.token_ids[:16],
            first_plane=0,
            planes=2,
            last=False,
            slot=lease.slot,
            lease=lease.lease,
            payload_bytes=128,
            payload_xxh3=xxhash.xxh3_128_digest(lease.buffer),
        )
        await bench.offers.send(half)
        await bench.offer(submit, FULL, 0)
        await bench.store.drain(10)
        assert bench.store.statistics().refusals == {"incomplete": 1}
        assert len(bench.files()) == 1


async def test_the_budget_holds_and_leaves_go_first(tmp_path: Path) -> None:
    async with opened(tmp_path, bytes_max=30_000) as bench:
        for seed in range(12):
            await bench.run(prompt(33, seed))
            assert bytes_under(tmp_path) <= 30_000
            assert_parents(bench)
        assert (await bench.run(prompt(33, 11))).admit.prefix_tokens == 32
        assert bench.store.statistics().root.evicted_blocks > 0  # type: ignore[union-attr]


def bytes_under(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def assert_parents(bench: Bench) -> None:
    assert bench.root is not None
    for shelf in bench.root.index.shelves.values():
        for block in shelf.blocks.values():
            assert block.parent is None or block.parent.chain_hash in shelf.blocks
            assert (Path(bench.root.disk.root) / shelf.folder).is_dir()  # type: ignore[attr-defined]


async def test_a_full_disk_evicts_then_turns_off_and_recovers(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))

        def full(path: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        bench.root.disk.faults["write"] = full  # type: ignore[union-attr]
        await bench.run(prompt(33, 1))
        problem = bench.store.statistics().problem
        assert "No space left" in problem
        hit = await bench.run(prompt(17))
        assert hit.admit.prefix_tokens == 16  # reading goes on
        assert not hit.admit.offers
        bench.clock[0] += 6
        assert not (await bench.run(prompt(5, 3))).admit.offers  # the probe failed
        del bench.root.disk.faults["write"]  # type: ignore[union-attr]
        bench.clock[0] += 100
        assert (await bench.run(prompt(33, 2))).admit.offers
        assert bench.store.statistics().problem == ""
        assert (await bench.run(prompt(33, 2))).admit.prefix_tokens == 32


async def test_a_disk_that_was_full_once_is_written_again_after_evicting(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))
        countdown = itertools.count()

        def full(path: str) -> None:
            if next(countdown) == 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        bench.root.disk.faults["write"] = full  # type: ignore[union-attr]
        await bench.run(prompt(33, 1))
        figures = bench.store.statistics()
        assert figures.problem == ""
        assert figures.root.evicted_blocks >= 1  # type: ignore[union-attr]
        assert (await bench.run(prompt(33, 1))).admit.prefix_tokens == 32


async def test_restores_keep_the_order_of_the_submissions(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=Limits(restores_max=1), slots=1) as bench:
        for seed in range(4):
            await bench.run(prompt(17, seed))
        requests = [bench.submit(prompt(17, seed)) for seed in range(4)]
        for request in requests:
            await bench.submissions.send(request)
        order: list[int] = []
        while len(order) < 4:
            message = await bench.admissions.receive()
            if isinstance(message, Restore):
                bench.restore_pool.give(message.slot, message.lease)
            else:
                assert isinstance(message, Admit)
                assert message.prefix_tokens == 16
                order.append(message.request_id)
        assert order == [request.request_id for request in requests]


async def test_a_cancel_before_admit_is_the_last_word_on_a_request(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=Limits(restores_max=1), slots=1) as bench:
        for seed in range(3):
            await bench.run(prompt(17, seed))
        requests = [bench.submit(prompt(17, seed)) for seed in range(3)]
        for request in requests:
            await bench.submissions.send(request)
        for request in requests[:2]:
            await bench.submissions.send(Cancel(request_id=request.request_id))
        seen: dict[int, list[str]] = {}
        for _ in range(100):
            message = await bench.admissions.receive()
            kind = type(message).__name__
            if isinstance(message, Cancel):
                kind = f"Cancel-{message.before_admit}"
            if isinstance(message, Restore):
                bench.restore_pool.give(message.slot, message.lease)
            seen.setdefault(message.request_id, []).append(kind)
            if kind == "Admit" and message.request_id == requests[2].request_id:
                break
        for request in requests[:2]:
            kinds = seen[request.request_id]
            assert set(kinds[:-1]) <= {"Restore"} and kinds[-1] == "Cancel-True"


async def test_a_cancel_of_an_admitted_request_is_passed_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        submit = bench.submit(prompt(9))
        await bench.admit(submit)
        await bench.submissions.send(Cancel(request_id=submit.request_id))
        assert await bench.admissions.receive() == Cancel(request_id=submit.request_id)


async def test_every_point_of_a_restore_can_be_cancelled(tmp_path: Path) -> None:
    """Cancel after each count of messages; slots come home, and the next request is whole."""
    async with opened(tmp_path, room=1, slots=2) as bench:
        await bench.run(prompt(33))
        for count in range(12):
            submit = bench.submit(prompt(33))
            await bench.submissions.send(submit)
            got: list[Any] = []
            while len(got) < count and not isinstance(got[-1] if got else None, Admit):
                got.append(await bench.admissions.receive())
                if isinstance(got[-1], Restore):
                    bench.restore_pool.give(got[-1].slot, got[-1].lease)
            await bench.submissions.send(Cancel(request_id=submit.request_id))
            while not isinstance(got[-1] if got else None, Cancel):
                got.append(await bench.admissions.receive())
                if isinstance(got[-1], Restore):
                    bench.restore_pool.give(got[-1].slot, got[-1].lease)
            admits = sum(isinstance(one, Admit) for one in got)
            assert admits == (0 if got[-1].before_admit else 1)
            assert bench.restore_pool.statistics().lent == 0
        warm = await bench.run(prompt(33))
        assert warm.admit.prefix_tokens == 32


async def test_many_requests_share_few_slots_without_a_deadlock(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=Limits(restores_max=4), slots=2) as bench:
        for seed in range(8):
            await bench.run(prompt(33, seed))
        requests = [bench.submit(prompt(33, seed % 8)) for seed in range(32)]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:

                async def send() -> None:
                    for request in requests:
                        await bench.submissions.send(request)

                group.start_soon(send)
                admits = 0
                while admits < len(requests):
                    message = await bench.admissions.receive()
                    if isinstance(message, Restore):
                        bench.restore_pool.give(message.slot, message.lease)
                    else:
                        assert isinstance(message, Admit)
                        assert message.prefix_tokens == 32
                        await bench.offers.send(Held(request_id=message.request_id))
                        admits += 1


async def test_a_stuck_reader_loses_its_slot_and_the_request_starts_cold(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=Limits(disk_stall_s=0.1)) as bench:
        await bench.run(prompt(33))
        release = time.monotonic() + 0.6

        def hang(path: str) -> None:
            while time.monotonic() < release:
                time.sleep(0.01)

        bench.root.disk.faults["read"] = hang  # type: ignore[union-attr]
        hit = await bench.run(prompt(33))
        assert hit.admit.prefix_tokens == 0
        assert set(hit.admit.restored.misses) == {"io_error"}
        assert bench.restore_pool.statistics().lost >= 1


async def test_the_log_line_tells_what_matters(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        await bench.run(prompt(33))
        assert "<SpillRoot 12 blocks" in repr(bench.store)
        assert "0 restoring, 0 waiting, 12 spilled, 0 refused" in repr(bench.store)
