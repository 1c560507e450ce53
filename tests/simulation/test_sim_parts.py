"""The simulated disk, model and threads by themselves."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.runtime.errors import EngineDied, EngineStalled
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.steps import DecodeToken, PrefillChunk, RestorePlanes, SnapshotPlanes, Step
from millpond.runtime.testing.fake_model import FakeModel
from millpond.runtime.testing.fake_rows import Shape, reference_tokens
from millpond.runtime.testing.schedule import Backend, Spinning, run_seeded
from millpond.runtime.testing.sim_device import SimDevice
from millpond.runtime.testing.sim_disk import SimDisk
from millpond.runtime.testing.sim_faults import CrashPoint, DiskFault, SimCrash
from millpond.runtime.testing.workers import Pace, SimWorker, WorkerFault

BACKENDS: list[Backend] = ["trio", "asyncio"]
GREEDY = SamplingParams()


# -- the disk


def read(disk: SimDisk, path: str, size: int = 64) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: disk.read_into(path, 0, memoryview(buffer))])


def test_a_written_file_is_read_listed_renamed_and_removed() -> None:
    disk = SimDisk(SimDevice(1))
    disk.write("a/b/x", [b"12", memoryview(b"345")], False)
    assert read(disk, "a/b/x") == b"12345"
    assert [(one.name, one.is_folder) for one in disk.scan("a")] == [("b", True)]
    assert [(one.name, one.bytes) for one in disk.scan("a/b")] == [("x", 5)]
    disk.rename("a/b/x", "c/y", True)
    assert read(disk, "c/y") == b"12345"
    assert disk.device.used_bytes == 5
    disk.remove("c/y")
    with pytest.raises(FileNotFoundError):
        read(disk, "c/y")
    assert disk.device.used_bytes == 0


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE"])
def test_a_planned_error_comes_at_its_call_and_no_other(kind: str) -> None:
    disk = SimDisk(SimDevice(1), [DiskFault(operation="write", nth=1, kind=kind)])
    disk.write("a", [b"1"], False)
    with pytest.raises(OSError, match=r"\[Errno"):
        disk.write("b", [b"2"], False)
    disk.write("c", [b"3"], False)
    assert disk.injected == {f"{kind} write": 1}


def test_a_full_file_system_refuses_what_does_not_fit() -> None:
    disk = SimDisk(SimDevice(1, capacity_bytes=10))
    disk.write("a", [b"12345678"], False)
    with pytest.raises(OSError, match="No space"):
        disk.write("b", [b"12345"], False)
    assert disk.device.used_bytes <= 10


def test_a_dead_process_does_nothing_more() -> None:
    device = SimDevice(1)
    disk = SimDisk(device, crash=CrashPoint(operation=1, effect="none"))
    disk.write("a", [b"1"], False)
    attempts: list[Callable[[], object]] = [
        lambda: disk.write("b", [b"2"], False),
        lambda: disk.remove("a"),
        lambda: disk.scan(""),
        disk.free_bytes,
    ]
    for attempt in attempts:
        with pytest.raises(SimCrash):
            attempt()
    assert list(device.files) == ["a"]


def test_a_killed_process_loses_nothing_that_it_finished() -> None:
    device = SimDevice(1)
    disk = SimDisk(device, crash=CrashPoint(operation=2))
    disk.write("a.tmp", [b"12345"], False)
    disk.rename("a.tmp", "a", False)
    with pytest.raises(SimCrash):
        disk.write("b", [bytes(1000)], False)
    assert read(SimDisk(device), "a") == b"12345"
    assert len(device.files.get("b", device.files["a"]).content) < 1000


def test_power_loss_spares_what_was_synced_and_only_that() -> None:
    fates = set()
    for seed in range(60):
        device = SimDevice(seed)
        disk = SimDisk(device)
        disk.write("s.tmp", [b"synced"], True)
        disk.rename("s.tmp", "s", True)
        disk.write("u.tmp", [b"unsynced"], False)
        disk.rename("u.tmp", "u", False)
        disk.kill(power=True)
        assert read(SimDisk(device), "s") == b"synced"
        unsynced = device.files.get("u")
        fates.add(None if unsynced is None else bytes(unsynced.content))
    assert {None, b"", b"unsynced"} <= fates
    assert any(
        fate not in (None, b"") and b"unsynced".startswith(fate[:8]) for fate in fates if fate
    )
    assert len(fates) > 6


def test_every_process_dies_when_the_power_goes() -> None:
    device = SimDevice(1)
    one, other = SimDisk(device), SimDisk(device)
    other.claim_writer("w")
    one.kill(power=True)
    with pytest.raises(SimCrash):
        other.scan("")
    assert not SimDisk(device).writer_lives("w")


def test_a_writer_lives_until_its_process_ends() -> None:
    device = SimDevice(1)
    one, other = SimDisk(device), SimDisk(device)
    one.claim_writer("w")
    assert other.writer_lives("w")
    one.kill(power=False)
    assert not other.writer_lives("w")


def test_rot_changes_one_bit_of_a_block() -> None:
    device = SimDevice(1)
    disk = SimDisk(device, [DiskFault(operation="scan", nth=0, kind="rot")])
    disk.write("v1/x.safetensors", [bytes(32)], True)
    disk.scan("")
    assert sum(byte.bit_count() for byte in device.files["v1/x.safetensors"].content) == 1


# -- the model


def layout(window: int, chunk_blocks: int) -> KvLayout:
    groups = (
        LayerGroup(0, LayerType.SLIDING, 1, 4, KvDType.F16, (0, 2)),
        LayerGroup(1, LayerType.FULL, 2, 4, KvDType.F16, (1,)),
    )
    return KvLayout(groups, 4, 4 * chunk_blocks, window, 0)


def reference(shape: KvLayout, prompt: list[int], count: int) -> list[int]:
    endless = reference_tokens(Shape.of(shape), b"w", prompt, 64)
    return [next(endless) for _ in range(count)]


def complete(
    shape: KvLayout,
    prompt: list[int],
    count: int,
    restored: dict[tuple[int, int], bytearray],
    to: int,
) -> tuple[list[int], dict[tuple[int, int], bytearray]]:
    """Restore up to ``to``, then prefill on the grid and decode; keep every whole block."""
    model, saved = FakeModel(shape, 64, b"w"), {}
    blocks = [(g, block) for g in shape.groups for block in shape.blocks_for(g, to)]
    restores = tuple(
        RestorePlanes(
            0, g.index, 4 * block, 4, 0, g.planes, memoryview(restored[g.index, block]), False, 99
        )
        for g, block in blocks
    )
    model.run(Step(restores=restores))
    tokens: list[int] = []
    for first in range(to, len(prompt), shape.chunk_tokens):
        end = min(len(prompt), first + shape.chunk_tokens)
        snapshots = []
        for block in range(first // 4, end // 4) if end - first == shape.chunk_tokens else ():
            for g in shape.groups:
                saved[g.index, block] = bytearray(g.block_bytes(4))
                view = memoryview(saved[g.index, block])
                snapshots.append(SnapshotPlanes(0, g.index, 4 * block, 4, 0, g.planes, view))
        sample = GREEDY if end == len(prompt) else None
        chunk = PrefillChunk(0, first, pack_tokens(prompt[first:end]), sample, 99)
        result = model.run(Step(prefills=(chunk,), snapshots=tuple(snapshots)))
        tokens += [one.token_id for one in result.sampled]
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        decode = DecodeToken(0, at, tokens[-1], GREEDY, len(tokens))
        tokens += [one.token_id for one in model.run(Step(decodes=(decode,))).sampled]
    return tokens, saved


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk_blocks", [1, 2])
def test_the_fake_model_agrees_with_its_reference_cold_and_warm(
    window: int, chunk_blocks: int
) -> None:
    shape = layout(window, chunk_blocks)
    for length in range(1, 34):
        prompt = [(7 * length + 3 * place * place) % 64 for place in range(length)]
        expected = reference(shape, prompt, 5)
        cold, saved = complete(shape, prompt, 5, {}, 0)
        assert cold == expected
        limit = shape.reuse_limit(length)
        for boundary in range(shape.chunk_tokens, limit + 1, shape.chunk_tokens):
            warm, _ = complete(shape, prompt, 5, saved, boundary)
            assert warm == expected


@pytest.mark.parametrize("group", [0, 1])
def test_any_wrong_row_that_is_seen_changes_the_text(group: int) -> None:
    shape = layout(6, 1)
    prompt = list(range(1, 22))
    expected, saved = complete(shape, prompt, 4, {}, 0)
    needed = shape.blocks_for(shape.groups[group], 20)
    for block in needed:
        for place in range(0, len(saved[group, block]), 5):
            token = 4 * block + place % (4 * 8) // 8
            if group == 0 and token < 20 - 6:
                continue  # behind the window: nobody sees it
            damaged = {key: bytearray(rows) for key, rows in saved.items()}
            damaged[group, block][place] ^= 1
            assert complete(shape, prompt, 4, damaged, 20)[0] != expected


# -- threads and time


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_run_in_order_and_a_started_one_is_waited_for(backend: Backend) -> None:
    done: list[str] = []

    async def main() -> None:
        worker = SimWorker("w", 1, Pace(share=1.0, call_s=1.0), [WorkerFault(call=0, kind="slow")])
        async with anyio.create_task_group() as group:
            with anyio.move_on_after(0.5) as scope:
                await worker.call(lambda: done.append("slow"))
            assert scope.cancelled_caught
            assert done == ["slow"]
            group.start_soon(worker.call, lambda: done.append("first"))
            await (
                anyio.wait_all_tasks_blocked()
            ) if backend == "trio" else await anyio.lowlevel.checkpoint()
            group.start_soon(worker.call, lambda: done.append("second"))

    run_seeded(main, 1, backend)
    assert done == ["slow", "first", "second"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "error"), [("stall", EngineStalled), ("die", EngineDied)])
def test_a_broken_thread_tells_all_who_wait_and_all_who_come(
    backend: Backend, kind: str, error: type[Exception]
) -> None:
    errors: list[type[BaseException]] = []

    async def main() -> float:
        worker = SimWorker("w", 1, Pace(), [WorkerFault(call=0, kind=kind)])

        async def call() -> None:
            try:
                await worker.call(lambda: None, 30.0)
            except (EngineStalled, EngineDied) as found:
                errors.append(type(found))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(call)
        await call()
        return anyio.current_time()

    assert run_seeded(main, 1, backend) <= 30.5
    assert errors == [error] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_tasks_that_keep_each_other_running_are_found_out(backend: Backend) -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(Spinning):
        run_seeded(main, 1, backend, turns_max=1000)


def test_another_seed_is_another_schedule() -> None:
    async def main() -> str:
        order: list[str] = []

        async def note(name: str) -> None:
            await anyio.lowlevel.checkpoint()
            order.append(name)

        async with anyio.create_task_group() as group:
            for name in "abcdefgh":
                group.start_soon(note, name)
        return "".join(order)

    assert run_seeded(main, 7) == run_seeded(main, 7)
    assert len({run_seeded(main, seed) for seed in range(6)}) > 3
