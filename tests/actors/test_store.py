"""The store over real arrows, threads and a real disk; the test plays gateway and engine."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import xxhash
from millpond.actors.store import Store, StoreParts
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_root
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Offer,
    Restore,
    SamplingParams,
    Snapshot,
    Submit,
    ToEngine,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox, channel
from millpond.runtime.config import Limits
from millpond.runtime.kv.blocks import block_chain, pack_tokens
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.kv.root import RootOptions, SpillRoot
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import PinnedThread

pytestmark = pytest.mark.anyio
BLOCK = 4
FINGERPRINT, GUARD = b"f" * 32, b"g" * 32
SLIDING = LayerGroup(0, LayerType.SLIDING, 1, 4, KvDType.F32, (0, 1))
FULL = LayerGroup(1, LayerType.FULL, 2, 4, KvDType.F32, (2,))
LAYOUT = KvLayout((SLIDING, FULL), BLOCK, BLOCK, 8, 16)
ROOT = chain_root(FINGERPRINT, GUARD, "exact")
TOKENS = itertools.count()
DEFAULTS = Limits()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(group: LayerGroup, chain_hash: bytes) -> bytes:
    """The payload of a block: a function of everything before it, so a wrong row shows."""
    seed = chain_hash + bytes([group.index])
    return hashlib.shake_128(seed).digest(group.block_bytes(BLOCK))


class FaultyDisk(PosixDisk):
    """A real disk whose operations can be made to fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faults: dict[str, Callable[[str], None]] = {}

    def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
        self.faults.get("read", lambda path: None)(path)
        return super().read_into(path, offset, *buffers)

    def write(self, path: str, parts: Any, sync: bool) -> None:
        self.faults.get("write", lambda path: None)(path)
        super().write(path, parts, sync)

    def remove(self, path: str) -> None:
        self.faults.get("remove", lambda path: None)(path)
        super().remove(path)


@dataclass
class Admitted:
    """What the engine got for one request."""

    admit: Admit
    planes: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass
class Bench:
    """Both far ends of the store, and a model that the test plays."""

    store: Store
    root: SpillRoot | None
    layout: KvLayout
    submissions: Outbox[ToStore]
    offers: Outbox[Offer]
    admissions: Inbox[ToEngine]
    restore_pool: StagingPool
    spill_pool: StagingPool
    clock: list[float]
    ids: Any = field(default_factory=itertools.count)

    def submit(self, tokens: list[int], root: bytes = ROOT, **options: Any) -> Submit:
        packed = pack_tokens(tokens)
        return Submit(
            request_id=next(self.ids),
            token_ids=packed,
            root=root,
            chain=block_chain(FINGERPRINT, root, packed, BLOCK),
            sampling=SamplingParams(),
            **options,
        )

    async def admit(self, submit: Submit) -> Admitted:
        """Send a request and collect its restored planes, as the engine would."""
        await self.submissions.send(submit)
        found: dict[tuple[int, int], bytes] = {}
        while True:
            message = await self.admissions.receive()
            assert message.request_id == submit.request_id
            if isinstance(message, Admit):
                assert not (message.prefix_tokens == 0 and message.restored.blocks)
                return Admitted(message, found if message.prefix_tokens else {})
            assert isinstance(message, Restore)
            if message.starts_over:
                found.clear()
            view = self.restore_pool.view(message.slot, message.lease, message.payload_bytes)
            key = (message.group, message.first_token)
            if not message.first_plane:
                found[key] = b""
            group = self.layout.groups[message.group]
            assert len(found[key]) == message.first_plane * group.plane_bytes(BLOCK)
            found[key] += bytes(view)
            self.restore_pool.give(message.slot, message.lease)

    async def offer(self, submit: Submit, group: LayerGroup, index: int, /, **changes: Any) -> None:
        """Offer one block, as the engine would after its chunk."""
        payload = changes.pop("payload", rows(group, submit.chain[index]))
        parts = group.parts(BLOCK, self.spill_pool.slot_bytes)
        for first, planes in parts:
            size = group.plane_bytes(BLOCK)
            piece = payload[first * size : (first + planes) * size]
            lease = await self.spill_pool.lend(len(piece))
            lease.buffer[:] = piece
            fields: dict[str, Any] = {
                "request_id": submit.request_id,
                "group": group.index,
                "first_token": index * BLOCK,
                "chain_hash": submit.chain[index],
                "parent": submit.chain[index - 1] if index else submit.root,
                "token_ids": submit.token_ids[4 * index * BLOCK : 4 * (index + 1) * BLOCK],
                "first_plane": first,
                "planes": planes,
                "last": first + planes == group.planes,
                "slot": lease.slot,
                "lease": lease.lease,
                "payload_bytes": len(piece),
                "payload_xxh3": xxhash.xxh3_128_digest(piece),
            }
            await self.offers.send(Snapshot(**fields | changes))

    async def run(self, tokens: list[int], **options: Any) -> Admitted:
        """Admit a prompt, check every restored row, offer what the store asks for, drain."""
        submit = self.submit(tokens, **options)
        admitted = await self.admit(submit)
        self.check(submit, admitted)
        admit = admitted.admit
        if admit.offers:
            for index in range(admit.prefix_tokens // BLOCK, len(submit.chain)):
                for group in self.layout.groups:
                    wanted = index >= admit.full_from_block
                    if not group.is_full:
                        wanted = index in admit.sliding_blocks
                    if wanted:
                        await self.offer(submit, group, index)
        await self.store.drain(10)
        return admitted

    def check(self, submit: Submit, admitted: Admitted) -> None:
        boundary = admitted.admit.prefix_tokens
        expected = {
            (group.index, index * BLOCK): rows(group, submit.chain[index])
            for group in self.layout.groups
            for index in self.layout.blocks_for(group, boundary)
        }
        assert admitted.planes == expected

    def files(self) -> list[Path]:
        assert self.root is not None
        found = Path(self.root.disk.root).rglob("*.safetensors")  # type: ignore[attr-defined]
        return sorted(path for path in found if "quarantine" not in path.parts)

    def path(self, submit: Submit, group: LayerGroup, index: int) -> Path:
        name = f"{submit.chain[index].hex()}.safetensors"
        return next(path for path in self.files() if path.name == name and group.name in str(path))


@asynccontextmanager
async def opened(
    path: Path | None,
    *,
    layout: KvLayout = LAYOUT,
    limits: Limits = DEFAULTS,
    bytes_max: int = 2**30,
    slot_bytes: int = 4096,
    slots: int = 4,
    guard: bytes = GUARD,
    room: int = 64,
) -> AsyncIterator[Bench]:
    clock = [0.0]
    arrows = [
        channel("submissions", ToStore, room),
        channel("offers", Offer, room),
        channel("admissions", ToEngine, room),
    ]
    pools = [StagingPool(name, slots, slot_bytes) for name in ("restore", "spill")]
    async with PinnedThread("a") as a, PinnedThread("b") as b, PinnedThread("w") as writer:
        root = None
        if path is not None:
            options = RootOptions(
                token=f"t{next(TOKENS)}",
                bytes_max=bytes_max,
                quarantine_bytes_max=limits.quarantine_bytes_max,
            )
            root = await writer.call(lambda: SpillRoot.open(FaultyDisk(path), options))
        store = Store(
            StoreParts(
                layout=layout,
                fingerprint=FINGERPRINT,
                guard=guard,
                limits=limits,
                root=root,
                readers=(a, b),
                writer=writer,
                restore_pool=pools[0],
                spill_pool=pools[1],
                clock=lambda: clock[0],
            )
        )
        async with anyio.create_task_group() as group:
            group.start_soon(store.run, arrows[0][1], arrows[1][1], arrows[2][0])
            bench = Bench(
                store,
                root,
                layout,
                arrows[0][0],
                arrows[1][0],
                arrows[2][1],
                pools[0],
                pools[1],
                clock,
            )
            try:
                yield bench
            finally:
                bench.submissions.close()
                bench.offers.close()
        if root is not None:
            root.close()
    assert all(pool.statistics().lent == 0 for pool in pools), "a slot did not come home"


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + index for index in range(tokens)]


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
