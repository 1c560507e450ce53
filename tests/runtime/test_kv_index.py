"""The prefix index: leaf-first, least recent first, one-off prompts first."""

from __future__ import annotations

import hashlib
import sys
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.runtime.kv.index import Block, FoundBlock, PrefixIndex
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.kv.plan import Shelves

FULL, SLIDING = "v1/ab/g1-full-h1-d4-f32", "v1/ab/g0-sliding-h1-d4-f32"


def name(*path: int) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def chain(index: PrefixIndex, *path: int, size: int = 10) -> list[Block]:
    """Add the blocks of a prompt; returns them, first block first."""
    shelf, found = index.shelf(FULL), []
    for depth in range(1, len(path) + 1):
        parent = name(*path[: depth - 1]) if depth > 1 else None
        block = index.add(shelf, name(*path[:depth]), size, parent)
        assert block is not None
        found.append(block)
    return found


def check(index: PrefixIndex) -> None:
    rings = [list(index.fresh), list(index.kept)]
    there = [block for shelf in index.shelves.values() for block in shelf.blocks.values()]
    assert len(there) == index.count == sum(map(len, rings))
    assert index.total_bytes == sum(block.bytes for block in there)
    place = {
        id(block): (number, at)
        for number, ring in enumerate(rings)
        for at, block in enumerate(ring)
    }
    for block in there:
        assert set(block.each_child()) == {one for one in there if one.parent is block}
        if block.parent is not None:
            assert block.parent in there, "no block without its parent"
            ring, at = place[id(block)]
            above, above_at = place[id(block.parent)]
            assert above > ring or (above == ring and above_at > at)


def test_a_block_without_its_parent_is_not_taken() -> None:
    index = PrefixIndex()
    assert index.add(index.shelf(FULL), name(1, 2), 10, name(1)) is None
    assert index.count == 0


def test_victims_are_leaves_oldest_first() -> None:
    index = PrefixIndex()
    chain(index, 1, 2, 3)
    chain(index, 9)
    assert [one.chain_hash for one in index.victims(25)] == [name(1, 2, 3), name(1, 2), name(1)]
    check(index)
    assert [one.chain_hash for one in index.victims(1000)] == [name(9)]
    assert index.victims(1) == []


def test_a_pinned_block_and_all_above_it_stay() -> None:
    index = PrefixIndex()
    blocks = chain(index, 1, 2, 3, 4)
    index.pin((blocks[2],))
    assert [one.chain_hash for one in index.victims(1000)] == [name(1, 2, 3, 4)]
    index.unpin((blocks[2],))
    assert len(index.victims(1000)) == 3


def test_one_off_prompts_do_not_flush_a_chain_that_is_used() -> None:
    index = PrefixIndex()
    index.use((chain(index, 1, 2, 3)[-1],))
    for number in range(100, 200):
        chain(index, number, 0, 0)
        index.victims(max(0, index.total_bytes - 120))
        check(index)
    assert all(name(*(1, 2, 3)[:depth]) in index.shelf(FULL).blocks for depth in (1, 2, 3))


def test_a_block_written_again_after_its_eviction_is_kept() -> None:
    index = PrefixIndex()
    chain(index, 1)
    index.victims(10)
    block = chain(index, 1)[0]
    assert block.ring is index.kept
    check(index)


def test_forget_takes_everything_behind_a_block() -> None:
    index = PrefixIndex()
    blocks = chain(index, 1, 2, 3)
    chain(index, 1, 2, 4, 5)
    chain(index, 1, 7)
    gone = index.forget(blocks[1])
    assert gone[-1] is blocks[1]
    assert {one.chain_hash for one in gone} == {
        name(1, 2),
        name(1, 2, 3),
        name(1, 2, 4),
        name(1, 2, 4, 5),
    }
    check(index)
    assert index.forget(blocks[1]) == []


def test_load_drops_what_lacks_a_parent_and_orders_by_use() -> None:
    def found(path: tuple[int, ...], mtime: int, folder: str = FULL) -> FoundBlock:
        return FoundBlock(folder, name(*path), name(*path[:-1]), 4 * (len(path) - 1), 10, mtime)

    index = PrefixIndex()
    orphans = index.load(
        [
            found((5, 6), 9),
            found((5, 6, 7), 9),
            found((1, 2), 30),
            found((1,), 1),
            found((3,), 20),
            found((8,), 5, SLIDING),
        ]
    )
    assert [one.chain_hash for one in orphans] == [name(5, 6), name(5, 6, 7)]
    check(index)
    order = [one.chain_hash for one in index.victims(1000)]
    assert order == [name(8), name(3), name(1, 2), name(1)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "evict", "forget", "pin"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
        ),
        max_size=60,
    )
)
def test_the_tree_stays_whole_whatever_happens(steps: list[tuple[str, list[int]]]) -> None:
    index = PrefixIndex()
    pinned: list[Block] = []
    for action, path in steps:
        block = index.shelf(FULL).blocks.get(name(*path))
        if action == "add":
            chain(index, *path)
            index.add(index.shelf(SLIDING), name(*path), 30, None)
        elif action == "evict":
            gone = index.victims(10 * len(path))
            assert not any(one.pins for one in gone)
        elif block is not None and action == "use":
            index.use((block,))
        elif block is not None and action == "forget":
            index.forget(block)
        elif block is not None:
            index.pin((block,))
            pinned.append(block)
        check(index)
    index.unpin(pinned)
    index.victims(10**9)
    assert index.count == 0


def test_a_block_takes_few_bytes_of_memory() -> None:
    if sys.implementation.name != "cpython":
        return
    tracemalloc.start()
    found = [
        FoundBlock(FULL, name(one // 64, one % 64), b"", 4 * (one % 64), 10**6, one)
        for one in range(20_000)
    ]
    for one in range(len(found)):
        if one % 64:
            found[one] = found[one]._replace(parent=found[one - 1].chain_hash)
    index = PrefixIndex()
    assert index.load(found) == []
    del found
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held / index.count <= 300


def shelves(index: PrefixIndex, window: int = 8, chunk: int = 4) -> tuple[Shelves, KvLayout]:
    groups = (
        LayerGroup(0, LayerType.SLIDING, 1, 4, KvDType.F32, (0,)),
        LayerGroup(1, LayerType.FULL, 1, 4, KvDType.F32, (1,)),
    )
    layout = KvLayout(groups, 4, chunk, window, 16)
    return Shelves(layout, lambda group: index.shelf(FULL if group.is_full else SLIDING)), layout


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 20),
    st.sampled_from([4, 8]),
    st.sets(st.integers(0, 9)),
    st.integers(0, 10),
    st.integers(0, 40),
)
def test_a_plan_is_the_longest_complete_boundary(
    window: int, chunk: int, sliding: set[int], full: int, limit: int
) -> None:
    index = PrefixIndex()
    found, layout = shelves(index, window, chunk)
    path = tuple(range(10))
    names = [name(*path[: depth + 1]) for depth in range(10)]
    chain(index, *path[:full])
    for number in sliding:
        index.add(index.shelf(SLIDING), names[number], 10, None)
    limit = limit // chunk * chunk

    def complete(boundary: int) -> bool:
        return all(
            found.has(group, names[block])
            for group in layout.groups
            for block in layout.blocks_for(group, boundary)
        )

    boundaries = [one for one in range(0, min(limit, 40) + 1, chunk) if complete(one)]
    plan = found.plan(names, limit)
    assert plan.boundary == max(boundaries)
    assert len(plan.blocks) == sum(
        len(layout.blocks_for(group, plan.boundary)) for group in layout.groups
    )
