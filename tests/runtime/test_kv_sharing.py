"""Several processes on one root: one budget, leaves first; what a crash leaves is freed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import xxhash
from millpond.runtime.errors import BlockError
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.journal import Kind
from root_bench import (
    FILE,
    FILE_BYTES,
    SLACK,
    WRITER_SCRIPT,
    bytes_under,
    draft_of,
    has,
    kv,
    opened,
    read,
    shelf_of,
    store,
)


def test_what_one_process_writes_the_other_finds(tmp_path: Path) -> None:
    one, two = opened(tmp_path, "one"), opened(tmp_path, "two")
    blocks = kv.prompt_blocks(0, 4)
    assert [store(one, block) for block in blocks[:2]] == ["", ""]
    assert store(two, blocks[2]) == "", "its parent came from the other process"
    two.flush()
    one.flush()
    assert all(has(one, block) and has(two, block) for block in blocks[:3])
    assert one.used_bytes == two.used_bytes == bytes_under(tmp_path)
    assert read(two, blocks[0]) == kv.payload_of(blocks[0])
    one.close()
    two.close()


def test_a_block_that_the_other_wrote_meanwhile_is_not_written_twice(tmp_path: Path) -> None:
    one, two = opened(tmp_path, "one"), opened(tmp_path, "two")
    assert store(one, FILE) == ""
    before = (tmp_path / FILE.path).stat().st_mtime_ns
    assert store(two, FILE) == ""
    assert (tmp_path / FILE.path).stat().st_mtime_ns == before
    one.close()
    two.close()


def test_the_budget_is_one_for_all_and_leaves_go_first(tmp_path: Path) -> None:
    limit = 10 * FILE_BYTES + SLACK
    roots = [opened(tmp_path, f"w{number}", limit) for number in range(3)]
    choose = random.Random(5)
    for turn in range(150):
        root = choose.choice(roots)
        for block in kv.prompt_blocks(choose.randrange(6), 5):
            assert store(root, block) in ("", "parent", "full"), turn
        assert bytes_under(tmp_path) <= limit
        on_disk = {path.name.partition(".")[0] for path in tmp_path.rglob("*.safetensors")}
        for seed in range(6):
            chain = [block.chain_hash.hex() in on_disk for block in kv.prompt_blocks(seed, 5)]
            assert chain == sorted(chain, reverse=True), "a block without its parent"
    for root in roots * 2:  # the first round may begin a new journal
        root.flush()
    assert len({root.index.count for root in roots}) == 1
    assert {root.used_bytes for root in roots} == {bytes_under(tmp_path)}
    for root in roots:
        root.close()


def test_a_parent_that_the_other_evicted_is_missed_before_the_child_gets_its_name(
    tmp_path: Path,
) -> None:
    one, two = opened(tmp_path, "one"), opened(tmp_path, "two")
    parent, child = kv.prompt_blocks(0, 2)
    assert store(one, parent) == ""
    two.flush()
    entry = shelf_of(two, parent).blocks[parent.chain_hash]
    two.forget(entry, None, 0.0)
    assert store(one, child) == "parent"
    assert not list(tmp_path.rglob("*.tmp"))
    one.close()
    two.close()


def test_the_parent_of_a_block_that_somebody_writes_is_no_victim(tmp_path: Path) -> None:
    limit = 3 * FILE_BYTES + SLACK
    one, two = opened(tmp_path, "one", limit), opened(tmp_path, "two", limit)
    parent, child = kv.prompt_blocks(0, 2)
    other = kv.prompt_blocks(1, 1)[0]
    assert store(one, parent) == ""
    with one._books.transaction() as records:  # one begins to write the child ...
        one._books.apply(
            one._writer._record(Kind.INTENT, shelf_of(one, child), draft_of(one, child)), records
        )
    for seed in range(2, 8):
        store(two, kv.prompt_blocks(seed, 1)[0])  # ... while two needs room
    assert has(two, parent) and (tmp_path / parent.path).exists()
    assert store(one, child) == ""
    assert not has(one, other)
    one.close()
    two.close()


def test_a_reservation_of_a_dead_writer_is_freed_and_of_a_living_one_kept(tmp_path: Path) -> None:
    """A reservation leaked by a crash would take its bytes from the budget for ever."""
    limit = 2 * FILE_BYTES + 6_000
    dead, living = opened(tmp_path, "dead", limit), opened(tmp_path, "living", limit)
    blocks = [kv.prompt_blocks(seed, 1)[0] for seed in range(4)]
    for root, block in ((dead, blocks[0]), (living, blocks[1])):
        with root._books.transaction() as records:
            intent = root._writer._record(Kind.INTENT, shelf_of(root, block), draft_of(root, block))
            root._books.apply(intent, records)
    (tmp_path / blocks[0].path).parent.mkdir(parents=True)
    half = tmp_path / f"{blocks[0].path}.dead.0.tmp"
    half.write_bytes(b"half of it")
    two = opened(tmp_path, "two", limit)
    assert two.statistics().reserved_bytes == 2 * FILE_BYTES
    assert store(two, blocks[2]) == "full"
    dead.close()  # the lock on its token is gone, as after a kill
    assert store(two, blocks[2]) == ""
    assert two.statistics().reserved_bytes == FILE_BYTES
    assert not half.exists()
    living.close()
    two.close()


def test_a_file_named_by_a_writer_that_died_before_it_said_so_is_not_lost_track_of(
    tmp_path: Path,
) -> None:
    one = opened(tmp_path, "one")
    with one._books.transaction() as records:
        one._books.apply(
            one._writer._record(Kind.INTENT, shelf_of(one, FILE), draft_of(one, FILE)), records
        )
    disk = PosixDisk(tmp_path)
    disk.write(
        FILE.path,
        (FILE.header(xxhash.xxh3_128_digest(kv.payload_of(FILE))), kv.payload_of(FILE)),
        False,
    )
    one.close()
    two = opened(tmp_path, "two")
    assert has(two, FILE)
    assert two.used_bytes == bytes_under(tmp_path)
    assert two.statistics().reserved_bytes == 0
    two.close()


def test_a_root_that_is_moved_away_turns_spilling_off_and_a_new_one_on(tmp_path: Path) -> None:
    path = tmp_path / "root"
    root = opened(path, "one")
    first, second = kv.prompt_blocks(0, 2)
    store(root, first)
    path.rename(tmp_path / "moved")
    assert store(root, second) == "off"
    assert "moved" in root.problem
    assert not (tmp_path / "moved" / second.path).exists()
    assert root.is_due(10.0)
    root.try_again(10.0)
    assert root.problem == ""
    assert not has(root, first)
    assert store(root, first) == ""
    assert (path / first.path).exists()
    assert [one.name for one in (path / "writers").iterdir()] == ["one"]
    root.close()


def test_a_root_that_is_removed_while_running_never_fails_a_call(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "root"
    root = opened(path, "one")
    store(root, FILE)
    shutil.rmtree(path)
    entry = shelf_of(root, FILE).blocks[FILE.chain_hash]
    with pytest.raises(FileNotFoundError):
        read(root, FILE)
    root.forget(entry, None, 0.0)
    assert root.problem
    root.try_again(1000.0)
    assert store(root, FILE) == ""
    assert read(root, FILE) == kv.payload_of(FILE)
    root.close()


def test_two_processes_share_a_root_while_one_is_killed_again_and_again(tmp_path: Path) -> None:
    limit = 24 * FILE_BYTES + SLACK
    choose = random.Random(11)
    stop = threading.Event()
    over: list[int] = []

    disk = PosixDisk(tmp_path)

    def watch() -> None:
        while not stop.is_set():
            with disk.lock():  # nobody removes one file and writes another while we walk
                found = bytes_under(tmp_path)
            if found > limit:
                over.append(found)
            time.sleep(0.002)

    def start(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(WRITER_SCRIPT), str(tmp_path), str(seed), str(limit)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    watcher = threading.Thread(target=watch)
    steady = start(1)
    assert steady.stdout is not None and steady.stdout.readline() == "open\n"
    watcher.start()
    drain = threading.Thread(target=partial(list, steady.stdout))
    drain.start()
    try:
        for kill in range(5):
            other = start(100 + kill)
            assert other.stdout is not None
            for _ in range(choose.randrange(1, 120)):
                other.stdout.readline()
            other.send_signal(signal.SIGKILL)
            other.wait()
            other.stdout.close()
            assert steady.poll() is None
    finally:
        steady.kill()
        steady.wait()
        drain.join()
        stop.set()
        watcher.join()
    assert over == []
    root = opened(tmp_path, "check", limit)
    there = {block for shelf in root.index.shelves.values() for block in shelf.blocks}
    verified: set[bytes] = set()
    for seed in (1, *range(100, 105)):
        for prompt in range(1000):
            first = kv.prompt_blocks(seed * 1000 + prompt, 1)[0]
            if first.chain_hash not in there:
                continue  # then none of its blocks is there
            for block in kv.prompt_blocks(seed * 1000 + prompt, 8):
                if block.chain_hash in there:
                    assert read(root, block) == kv.payload_of(block)
                    verified.add(block.chain_hash)
    assert verified == there
    assert not list(tmp_path.rglob("*.tmp"))
    with pytest.raises((BlockError, FileNotFoundError)):
        read(root, kv.prompt_blocks(999_999, 1)[0])
    root.close()
