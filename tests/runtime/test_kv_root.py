"""The spill root: what a crash leaves, what an open does, what the budget means."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from millpond.runtime.errors import SpillFailed
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.files import read_block
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.root import RootOptions, SpillRoot, open_spill_root
from millpond.runtime.threads import PinnedThread

pytestmark = pytest.mark.anyio
_SCRIPT = Path(__file__).with_name("kv_writer.py")
_SPEC = importlib.util.spec_from_file_location("kv_writer", _SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
kv: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kv)
FILE = kv.prompt_blocks(0, 1)[0]
FILE_BYTES = FILE.header_bytes() + FILE.payload_bytes


def options(token: str = "me", **changes: Any) -> RootOptions:
    return RootOptions(**({"token": token, "bytes_max": 2**30} | changes))


def opened(path: Path, token: str = "me", bytes_max: int = 2**30, **changes: Any) -> SpillRoot:
    return open_spill_root(path, bytes_max, options(token, **changes))


def bytes_under(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def found(path: Path, pattern: str) -> list[Path]:
    return sorted(path.rglob(pattern))


def verify(root: SpillRoot, blocks: Iterator[BlockIdentity] | list[BlockIdentity]) -> int:
    """Read every block that the index promises; return their count."""
    count = 0
    for block in blocks:
        shelf = root.shelf(block.path.rsplit("/", 2)[0])
        if block.chain_hash in shelf.blocks:
            buffer = memoryview(bytearray(block.payload_bytes))
            read_block(root.disk, block, buffer)
            assert bytes(buffer) == kv.payload_of(block)
            count += 1
    return count


async def fill(root: SpillRoot, prompts: int, count: int = 8) -> list[BlockIdentity]:
    blocks = []
    async with PinnedThread("disk") as worker:
        for seed in range(prompts):
            for number, block in enumerate(kv.prompt_blocks(seed, count)):
                await kv.spill(root, worker, block, seed * count + number)
                blocks.append(block)
    return blocks


async def test_an_open_finds_what_was_written(tmp_path: Path) -> None:
    root = opened(tmp_path)
    blocks = await fill(root, 3)
    root.close()
    again = opened(tmp_path, "next")
    assert verify(again, blocks) == len(blocks) == again.index.count
    assert again.used_bytes == bytes_under(tmp_path)
    again.close()


async def test_a_plain_restart_at_the_same_budget_deletes_nothing(tmp_path: Path) -> None:
    root = opened(tmp_path, bytes_max=10 * FILE_BYTES)
    await fill(root, 5)
    before = found(tmp_path, "*.safetensors")
    root.close()
    again = opened(tmp_path, "next", bytes_max=10 * FILE_BYTES)
    assert found(tmp_path, "*.safetensors") == before
    again.close()


async def test_an_open_at_half_the_budget_keeps_within_it_leaf_first(tmp_path: Path) -> None:
    root = opened(tmp_path)
    blocks = await fill(root, 4)
    root.close()
    limit = 15 * FILE_BYTES + 4000
    again = opened(tmp_path, "next", bytes_max=limit)
    assert bytes_under(tmp_path) <= limit
    left = verify(again, blocks)
    assert left == again.index.count
    assert 10 < left <= 15
    for shelf in again.index.shelves.values():
        assert all(one.parent is None or one.parent.ring for one in shelf.blocks.values())
    again.close()


async def test_the_budget_counts_what_is_not_ours_and_leaves_it_alone(tmp_path: Path) -> None:
    other = tmp_path / "v2" / "ab" / "x.bin"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x" * 5 * FILE_BYTES)
    root = opened(tmp_path, bytes_max=10 * FILE_BYTES)
    await fill(root, 3)
    assert bytes_under(tmp_path) <= 10 * FILE_BYTES
    assert other.exists()
    root.close()


async def test_a_block_larger_than_the_budget_is_refused_and_nothing_is_evicted(
    tmp_path: Path,
) -> None:
    root = opened(tmp_path, bytes_max=FILE_BYTES // 2)
    async with PinnedThread("disk") as worker:
        assert await kv.spill(root, worker, FILE, 0) == "full"
    root.close()


class SmallDisk(PosixDisk):
    """A file system of 100 blocks of which so many bytes are free."""

    free = 0

    def total_bytes(self) -> int:
        return 100 * FILE_BYTES

    def free_bytes(self) -> int:
        return self.free


async def test_the_floor_of_free_space_is_kept_and_a_full_disk_is_said(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path)
    disk.free = 20 * FILE_BYTES
    root = SpillRoot.open(disk, options(free_bytes_min=2**40))
    await fill(root, 1, 2)
    disk.free = 6 * FILE_BYTES  # the floor is a twentieth, five blocks
    async with PinnedThread("disk") as worker:
        third = kv.prompt_blocks(0, 3)[2]
        assert await kv.spill(root, worker, third, 9) == "off"
        assert "too few are free" in root.problem
        assert root.index.count == 2, "its own chain was not evicted for it"
        disk.free = 20 * FILE_BYTES
        await worker.call(lambda: root.try_again(1000.0))
        assert await kv.spill(root, worker, third, 10) == ""
    root.close()


async def test_temporaries_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living = opened(tmp_path, "living")
    folder = (tmp_path / FILE.path).parent
    folder.mkdir(parents=True)
    names = {
        token: folder / f"{FILE.chain_hash.hex()}.safetensors.{token}.1.tmp"
        for token in ("living", "dead")
    }
    for path in names.values():
        path.write_bytes(b"half")
    again = opened(tmp_path, "next")
    assert names["living"].exists()
    assert not names["dead"].exists()
    living.close()
    again.close()
    last = opened(tmp_path, "last")
    assert not names["living"].exists()
    assert [path.name for path in (tmp_path / "writers").iterdir()] == ["last"]
    last.close()


async def test_bad_files_are_set_aside_at_open(tmp_path: Path) -> None:
    root = opened(tmp_path)
    blocks = await fill(root, 1, 2)
    root.close()
    (tmp_path / blocks[1].path).write_bytes(b"not a header")
    wrong = tmp_path / blocks[0].path.replace("g0-full", "g1-full")
    wrong.parent.mkdir(parents=True)
    wrong.write_bytes((tmp_path / blocks[0].path).read_bytes())
    again = opened(tmp_path, "next", quarantine_bytes_max=2**20)
    assert verify(again, blocks) == 1
    reasons = sorted(path.stem.rpartition("-")[2] for path in found(tmp_path, "quarantine/*.json"))
    assert reasons == ["corrupt", "mismatch"]
    again.close()


async def test_blocks_without_their_parent_are_removed_at_open(tmp_path: Path) -> None:
    root = opened(tmp_path)
    blocks = await fill(root, 1)
    root.close()
    (tmp_path / blocks[3].path).unlink()
    again = opened(tmp_path, "next")
    assert again.index.count == 3
    assert len(found(tmp_path, "*.safetensors")) == 3
    again.close()


def test_a_root_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(SpillFailed, match="File exists"):
        opened(file)
    with pytest.raises(SpillFailed, match="Not a directory"):
        opened(file / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_root_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpillFailed, match="Permission denied"):
        opened(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
async def test_a_pipe_or_a_link_in_a_files_place_is_one_miss(tmp_path: Path, make: Any) -> None:
    root = opened(tmp_path)
    blocks = await fill(root, 1)
    root.close()
    for victim in (tmp_path / blocks[-1].path, tmp_path / "journal"):
        victim.unlink()
        make(victim)
    again = opened(tmp_path, "next")  # neither waits nor gives up the root
    assert not again.problem and not found(tmp_path, blocks[-1].path.rpartition("/")[2])
    assert verify(again, blocks) == len(blocks) - 1
    again.close()
    third = opened(tmp_path, "third")
    assert verify(third, blocks) == len(blocks) - 1 and not third.problem
    third.close()


def test_a_new_root_is_private_and_an_old_folder_keeps_its_mode(tmp_path: Path) -> None:
    opened(tmp_path / "a" / "new").close()
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    old = tmp_path / "old"
    old.mkdir(mode=0o755)
    (old / "something").write_bytes(b"")
    opened(old).close()
    assert old.stat().st_mode & 0o777 == 0o755
    assert (old / "writers").stat().st_mode & 0o777 == 0o700


def test_two_processes_cannot_have_one_token(tmp_path: Path) -> None:
    root = opened(tmp_path, "same")
    with pytest.raises(SpillFailed):
        opened(tmp_path, "same")
    root.close()
    opened(tmp_path, "same").close()


def test_a_disk_keeps_to_the_folder_it_opened(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path / "root")
    assert disk.is_attached()
    (tmp_path / "root").rename(tmp_path / "moved")
    (tmp_path / "root").mkdir()
    assert not disk.is_attached()
    disk.write("a/b", (b"x",), False)
    assert (tmp_path / "moved" / "a" / "b").exists()
    assert not (tmp_path / "root" / "a").exists()


def test_append_ends_the_file_where_it_wrote(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    disk.append("journal", 0, b"abcdef", True)
    disk.append("journal", 3, b"x", False)
    assert (tmp_path / "journal").read_bytes() == b"abcx"


def test_the_lock_keeps_others_out(tmp_path: Path) -> None:
    disks = [PosixDisk(tmp_path) for _ in range(2)]
    order: list[str] = []
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        with disks[1].lock():
            order.append("second")

    thread = threading.Thread(target=wait)
    with disks[0].lock():
        thread.start()
        entered.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_large_write_is_cut_by_the_system_and_still_whole(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    parts = [bytes([index % 251]) * 7 for index in range(2000)]
    disk.write("file", parts, False)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    buffers = [memoryview(bytearray(7)) for _ in range(2001)]
    assert disk.read_into("file", 0, *buffers) == 14_000
    assert b"".join(map(bytes, buffers[:2000])) == b"".join(parts)


def test_a_writer_killed_at_any_moment_leaves_a_usable_root(tmp_path: Path) -> None:
    """The writer is a real process; what the next open accepts verifies, and no litter stays."""
    choose = random.Random(7)
    published: set[str] = set()
    for kill in range(12):
        command = [sys.executable, str(_SCRIPT), str(tmp_path), str(kill), str(60 * FILE_BYTES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(choose.randrange(1, 60)):
                published.add(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
        root = opened(tmp_path, f"check{kill}", bytes_max=60 * FILE_BYTES)
        every = [
            block
            for seed in range(kill + 1)
            for prompt in range(10)
            for block in kv.prompt_blocks(seed * 1000 + prompt, 8)
        ]
        assert verify(root, every) == root.index.count
        assert not found(tmp_path, "*.tmp")
        assert bytes_under(tmp_path) <= 60 * FILE_BYTES
        root.close()
    assert len(published) > 50


class BrokenDisk(PosixDisk):
    """Fails removals while told to."""

    fails = False

    def remove(self, path: str) -> None:
        if self.fails and path.endswith(".safetensors"):
            raise OSError(errno.EROFS, "Read-only file system")
        super().remove(path)


async def test_a_file_that_cannot_be_removed_still_counts(tmp_path: Path) -> None:
    disk = BrokenDisk(tmp_path)
    root = SpillRoot.open(disk, options(bytes_max=4 * FILE_BYTES + 3000))
    await fill(root, 1, 4)
    disk.fails = True
    async with PinnedThread("disk") as worker:
        late = kv.prompt_blocks(9, 1)[0]
        assert await kv.spill(root, worker, late, 99) == "off"
        assert "Read-only" in root.problem
        assert root.used_bytes == bytes_under(tmp_path)
        disk.fails = False
        await worker.call(lambda: root.try_again(1000.0))
        assert root.problem == ""
        assert root.used_bytes == bytes_under(tmp_path)
        assert await kv.spill(root, worker, late, 100) == ""
    root.close()
