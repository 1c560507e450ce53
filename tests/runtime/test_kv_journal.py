"""The journal of a root: it spares the headers, and a bad one costs only time."""

from __future__ import annotations

from pathlib import Path

import pytest
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.journal import KEPT, OLDER, Journal, JournalCodec, Kind, Record
from millpond.runtime.kv.root import RootOptions, SpillRoot
from root_bench import FILE_BYTES, SLACK, bytes_under, has, kv, opened, shelf_of, store


@pytest.mark.parametrize(
    "how", ["missing", "empty", "torn", "flipped", "stale", "foreign", "zeros"]
)
def test_a_bad_journal_costs_only_time(tmp_path: Path, how: str) -> None:
    root = opened(tmp_path, "one")
    blocks = [block for seed in range(4) for block in kv.prompt_blocks(seed, 4)]
    for block in blocks[:8]:
        store(root, block)
    journal = tmp_path / "journal"
    stale = journal.read_bytes()
    for block in blocks[8:]:
        store(root, block)
    root.close()
    whole = journal.read_bytes()
    changed = {
        "empty": b"",
        "torn": whole[:-17],
        "flipped": whole[:300] + bytes([whole[300] ^ 4]) + whole[301:],
        "stale": stale,
        "foreign": b"something else altogether, long enough to be a journal",
        "zeros": whole + bytes(1000),
    }
    journal.unlink()
    if how in changed:
        journal.write_bytes(changed[how])
    again = opened(tmp_path, "two")
    assert all(has(again, block) for block in blocks)
    assert again.used_bytes == bytes_under(tmp_path)
    again.close()
    third = opened(tmp_path, "three")
    assert third.index.count == len(blocks)
    third.close()


@pytest.mark.parametrize("how", ["missing", "torn", "short", "zeros"])
def test_a_journal_that_breaks_while_it_is_used_is_begun_anew(tmp_path: Path, how: str) -> None:
    one, two = opened(tmp_path, "one"), opened(tmp_path, "two")
    blocks = kv.prompt_blocks(0, 6)
    for block in blocks[:2]:
        store(one, block)
    two.flush()
    journal = tmp_path / "journal"
    whole = journal.read_bytes()
    journal.unlink()
    if how != "missing":
        broken = {"torn": whole + b"abc", "short": whole[:-9], "zeros": whole + bytes(64)}[how]
        journal.write_bytes(broken)
    assert store(one, blocks[2]) == ""
    assert store(two, blocks[3]) == ""
    one.flush()
    for root in (one, two):
        assert [has(root, block) for block in blocks] == [True] * 4 + [False] * 2
        assert root.used_bytes == bytes_under(tmp_path)
    one.close()
    two.close()


def test_a_known_journal_spares_the_headers(tmp_path: Path) -> None:
    root = opened(tmp_path, "one")
    for block in kv.prompt_blocks(0, 6):
        store(root, block)
    root.close()
    reads: list[str] = []

    class Watched(PosixDisk):
        def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
            reads.append(path)
            return super().read_into(path, offset, *buffers)

    again = SpillRoot.open(Watched(tmp_path), RootOptions(token="two", bytes_max=2**30))
    assert again.index.count == 6
    assert {path for path in reads if path.endswith(".safetensors")} == set()
    again.close()


def test_a_chain_that_is_used_outlives_a_restart(tmp_path: Path) -> None:
    root = opened(tmp_path, "one")
    used = kv.prompt_blocks(0, 3)
    for block in used:
        store(root, block)
    root.use((shelf_of(root, used[-1]).blocks[used[-1].chain_hash],))
    for seed in range(1, 5):
        for block in kv.prompt_blocks(seed, 3):
            store(root, block)
    root.close()
    again = opened(tmp_path, "two", 8 * FILE_BYTES)
    assert all(has(again, block) for block in used)
    for seed in range(10, 20):
        for block in kv.prompt_blocks(seed, 3):
            store(again, block)
    assert all(has(again, block) for block in used), "a sweep of one-off prompts flushed it"
    again.close()


def test_every_record_comes_back_and_a_flipped_bit_ends_the_reading() -> None:
    records = [
        Record(
            Kind.BLOCK, "v1/a/g0-full", b"h" * 32, b"p" * 32, 256, 10**12, "token", KEPT | OLDER
        ),
        Record(Kind.INTENT, "v1/a/g1-sliding", b"i" * 32, b"p" * 32, 0, 5, "token"),
        Record(Kind.RELEASE, token="token"),
        Record(Kind.GONE, "v1/a/g0-full", b"h" * 32),
        Record(Kind.USED, "v1/b/g0-full", b"h" * 32),
        Record(Kind.ASIDE, bytes=77),
    ]
    data = JournalCodec().encode(records)
    assert JournalCodec().decode(data) == (records, len(data))
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        found, used = JournalCodec().decode(bytes(broken))
        assert found == records[: len(found)] and len(found) < len(records) and used <= bit // 8
    for size in range(len(data)):
        found, used = JournalCodec().decode(data[:size])
        assert found == records[: len(found)] and used <= size


def test_a_journal_is_compacted_before_it_grows(tmp_path: Path) -> None:
    limit = 4 * FILE_BYTES + SLACK
    root = opened(tmp_path, "one", limit)
    for seed in range(300):
        store(root, kv.prompt_blocks(seed, 1)[0])
    assert (tmp_path / "journal").stat().st_size < 8000
    root.close()


def test_journals_of_two_readers_agree(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    one, two = Journal(disk, "one"), Journal(disk, "two")
    assert one.read().is_broken
    one.replace([Record(Kind.ASIDE, bytes=1)])
    assert two.read().records == [Record(Kind.ASIDE, bytes=1)]
    two.append([Record(Kind.GONE, "v1/a/b", b"h" * 32)])
    assert one.read().records == [Record(Kind.GONE, "v1/a/b", b"h" * 32)]
    one.append([Record(Kind.USED, "v1/a/b", b"h" * 32)])
    tail = two.read()
    assert (tail.records, tail.is_whole, tail.is_broken) == (
        [Record(Kind.USED, "v1/a/b", b"h" * 32)],
        False,
        False,
    )
