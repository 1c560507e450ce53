"""Pins for a time: what they hold, how much, for how long, and over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.runtime.errors import BlockError
from millpond.runtime.kv.books import HELD_SHARE
from millpond.runtime.kv.disk import JOURNAL, PosixDisk
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.index import PrefixIndex
from millpond.runtime.kv.ledger import Ledger
from millpond.runtime.kv.pinned import pinned_tips, unpin
from millpond.runtime.kv.root import SpillRoot
from root_bench import FILE_BYTES, SLACK, bytes_under, has, kv, opened, shelf_of, store

FOLDER = "v1/ab/g1-full-h1-d4-f32"


def name(number: int) -> bytes:
    return bytes([number]) * 32


def check(index: PrefixIndex) -> None:
    """Rings hold every block once, parents behind their children, held ones under held ones."""
    blocks = list(index.shelf(FOLDER).blocks.values())
    rings = (list(index.fresh), list(index.kept), list(index.held))
    assert sorted(map(id, blocks)) == sorted(id(one) for ring in rings for one in ring)
    place = {id(one): (ring, at) for ring, row in enumerate(rings) for at, one in enumerate(row)}
    for one in blocks:
        assert (one.ring is index.held) == bool(index.held_until(one))
        if one.parent is not None:
            assert place[id(one.parent)] > place[id(one)]
            if one.ring is index.held:
                assert index.held_until(one.parent) >= index.held_until(one)


STEPS = st.tuples(
    st.sampled_from(["add", "use", "hold", "release", "expire", "victims", "forget"]),
    st.integers(0, 30),
    st.integers(1, 9),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_held_blocks_are_no_victims_and_lie_under_held_ones(
    steps: list[tuple[str, int, int]],
) -> None:
    index = PrefixIndex()
    shelf = index.shelf(FOLDER)
    for step, number, time in steps:
        block = shelf.blocks.get(name(number))
        if step == "add":
            index.add(shelf, name(number), 1, name(number % time) if number >= time else None)
        elif step == "expire":
            index.release_expired(time)
        elif step == "victims":
            held = set(index.held)
            assert not held & set(index.victims(time))
        elif block is not None and step == "use":
            index.use((block,))
        elif block is not None and step == "hold":
            index.hold(block, time)
        elif block is not None and step == "release":
            index.release(block)
        elif block is not None:
            index.forget(block)
        check(index)
    ledger, again = Ledger(), Ledger()
    ledger.index = index
    again.apply_all(ledger.snapshot())
    check(again.index)
    assert again.index.held_tips() == [
        (again.index.shelf(FOLDER).blocks[one.chain_hash], until)
        for one, until in index.held_tips()
    ]
    assert again.index.held.bytes == index.held.bytes


def filled(root: SpillRoot, seeds: range, count: int = 4) -> list[BlockIdentity]:
    blocks = [block for seed in seeds for block in kv.prompt_blocks(seed, count)]
    assert {store(root, block) for block in blocks} <= {""}
    return blocks


def crowd(root: SpillRoot, seeds: range) -> None:
    """Fill the root with prompts that are used, each of them more recently than all before."""
    for seed in seeds:
        last = filled(root, range(seed, seed + 1))[-1]
        root.use((shelf_of(root, last).blocks[last.chain_hash],))


def hold(root: SpillRoot, block: BlockIdentity, until: int) -> str:
    return root.hold((shelf_of(root, block).blocks[block.chain_hash],), until, 0.0)


BUDGET = 12 * FILE_BYTES + SLACK


def test_a_pinned_prompt_outlives_any_number_of_others_and_a_restart(tmp_path: Path) -> None:
    root = opened(tmp_path, "one", BUDGET, now=lambda: 100.0)
    pinned = filled(root, range(1))
    assert hold(root, pinned[-1], 200) == ""
    crowd(root, range(1, 8))
    assert all(has(root, block) for block in pinned)
    assert root.statistics().pinned_bytes == 4 * FILE_BYTES
    root.close()
    root = opened(tmp_path, "two", BUDGET, now=lambda: 199.0)
    crowd(root, range(8, 16))
    assert all(has(root, block) for block in pinned)
    assert bytes_under(tmp_path) <= BUDGET
    root.close()
    root = opened(tmp_path, "three", BUDGET, now=lambda: 200.0)
    crowd(root, range(16, 24))
    assert not any(has(root, block) for block in pinned[1:])
    root.close()


def test_no_more_than_a_share_of_the_budget_can_be_pinned(tmp_path: Path) -> None:
    root = opened(tmp_path, "one", BUDGET, now=lambda: 100.0)
    first, second = filled(root, range(1)), filled(root, range(1, 2))
    third = kv.prompt_blocks(2, 4)
    assert {store(root, block) for block in third} == {""}
    assert hold(root, first[-1], 200) == ""
    assert "half of the budget" in hold(root, second[-1], 200)
    assert hold(root, first[-1], 300) == ""
    assert root.statistics().pinned_bytes == 4 * FILE_BYTES <= BUDGET // HELD_SHARE
    root.close()


def test_a_smaller_budget_ends_the_pins_that_it_cannot_keep(tmp_path: Path) -> None:
    root = opened(tmp_path, "one", 4 * BUDGET, now=lambda: 100.0)
    short, long = filled(root, range(1)), filled(root, range(1, 2))
    assert hold(root, long[-1], 300) == hold(root, short[-1], 200) == ""
    root.close()
    root = opened(tmp_path, "two", BUDGET, now=lambda: 100.0)
    assert root.statistics().pinned_bytes == 4 * FILE_BYTES
    crowd(root, range(2, 10))
    assert all(has(root, block) for block in long)
    assert bytes_under(tmp_path) <= BUDGET
    root.close()


def test_another_process_does_not_evict_what_is_pinned_here(tmp_path: Path) -> None:
    one = opened(tmp_path, "one", BUDGET, now=lambda: 100.0)
    two = opened(tmp_path, "two", BUDGET, now=lambda: 100.0)
    pinned = filled(one, range(1))
    assert hold(one, pinned[-1], 200) == ""
    crowd(two, range(1, 8))
    assert all(has(two, block) for block in pinned)
    assert hold(two, pinned[-1], 0) == ""
    crowd(one, range(8, 16))
    assert not any(has(one, block) for block in pinned[1:])
    one.close()
    two.close()


def test_pins_survive_a_new_generation_and_a_reader_of_it(tmp_path: Path) -> None:
    one, two = opened(tmp_path, "one"), opened(tmp_path, "two")
    blocks = filled(one, range(2))
    assert hold(one, blocks[3], 2**40) == ""
    with one._books.transaction():
        one._books.rewrite()
    assert store(two, kv.prompt_blocks(5, 1)[0]) == ""
    assert two.statistics().pinned_bytes == 4 * FILE_BYTES
    (tip,) = pinned_tips(PosixDisk(tmp_path))
    assert (tip.chain_hash, tip.until) == (blocks[3].chain_hash.hex(), 2**40)
    with pytest.raises(BlockError):
        unpin(two, blocks[2].chain_hash.hex())
    assert unpin(two, tip.chain_hash) == 1
    assert pinned_tips(PosixDisk(tmp_path)) == []
    one.close()
    two.close()


def test_a_lost_journal_loses_pins_and_nothing_else(tmp_path: Path) -> None:
    root = opened(tmp_path, "one")
    blocks = filled(root, range(1))
    assert hold(root, blocks[-1], 2**40) == ""
    root.close()
    (tmp_path / JOURNAL).unlink()
    root = opened(tmp_path, "two")
    assert all(has(root, block) for block in blocks)
    assert root.statistics().pinned_bytes == 0
    root.close()


def test_a_pinned_block_whose_file_is_bad_goes_all_the_same(tmp_path: Path) -> None:
    root = opened(tmp_path, "one", quarantine_bytes_max=2**20)
    blocks = filled(root, range(1))
    assert hold(root, blocks[-1], 2**40) == ""
    root.forget(shelf_of(root, blocks[1]).blocks[blocks[1].chain_hash], ("corrupt", "test"), 0.0)
    assert [has(root, block) for block in blocks] == [True, False, False, False]
    assert root.statistics().pinned_bytes == FILE_BYTES
    root.close()
