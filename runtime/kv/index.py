"""The prefix index: which blocks are on disk, and which go first.  Pure; event loop only.

A *shelf* is one model's group folder.  Blocks of a full group form trees by their parents; blocks
of a sliding group stand alone.

Invariants

(I1) No block of a full group is here without its parent.
(I2) Blocks lie in two rings, each ordered by last use.  Every use of a block counts as a later use
     of its parent, and a block in ``kept`` has its parent there too: so in each ring a block is
     nearer to the old end than its parent, and the oldest block of ``fresh`` has no children.
(I3) A pinned block, whose file is being read, is no victim; nor is any block above it.
(I4) ``total_bytes`` is the sum over the blocks here.

Policy: 2Q (Johnson & Shasha, VLDB 1994) on trees.  A block enters ``fresh``; once a request reads
it, or it is written again soon after it went, it moves to ``kept``.  Victims come from ``fresh``
while that holds more than ``FRESH_SHARE`` of the bytes, so one-off prompts push each other out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

FRESH_SHARE = 0.25
GHOSTS_MIN = 1024  # names of evicted blocks remembered at least
LOOK_AHEAD = 64  # candidates of one ring looked at for one victim


class FoundBlock(NamedTuple):
    """A block file that a scan or the journal found.

    folder    the group's folder
    parent    as its header says
    mtime_ns  when it was last used, or written if that is not known
    """

    folder: str
    chain_hash: bytes
    parent: bytes
    first_token: int
    bytes: int
    mtime_ns: int


class Block:
    """One block file.

    parent    the block before, None for the first of a prompt and in sliding groups
    children  None, the only child, or several in order of arrival
    pins      reads in progress
    """

    __slots__ = (
        "bytes",
        "chain_hash",
        "children",
        "newer",
        "older",
        "parent",
        "pins",
        "ring",
        "shelf",
    )

    def __init__(self, shelf: Shelf, chain_hash: bytes, size: int, parent: Block | None) -> None:
        self.shelf, self.chain_hash, self.bytes, self.parent = shelf, chain_hash, size, parent
        self.children: Block | dict[Block, None] | None = None
        self.pins = 0
        self.ring: Ring | None = None
        self.older: Block = self
        self.newer: Block = self

    def each_child(self) -> Iterator[Block]:
        """Iterate over the blocks that follow this one."""
        if isinstance(self.children, Block):
            yield self.children
        elif self.children is not None:
            yield from self.children


class Ring:
    """A list by last use; the sentinel's ``newer`` is the oldest block."""

    def __init__(self) -> None:
        self._end = Block.__new__(Block)
        self._end.older = self._end.newer = self._end
        # mutable state, changed only in insert_above and take
        self.bytes = 0

    def __iter__(self) -> Iterator[Block]:
        """Iterate from the oldest to the newest."""
        block = self._end.newer
        while block is not self._end:
            following = block.newer
            yield block
            block = following

    def append(self, block: Block) -> None:
        """Make a block the newest."""
        self._link(block, self._end.older)

    def prepend(self, block: Block) -> None:
        """Make a block the oldest."""
        self._link(block, self._end)

    def newest_first(self) -> Iterator[Block]:
        """Iterate from the newest to the oldest."""
        block = self._end.older
        while block is not self._end:
            yield block
            block = block.older

    def insert_below(self, block: Block, above: Block) -> None:
        """Make a block the one used just before ``above``, which is in this ring."""
        self._link(block, above.older)

    def take(self, block: Block) -> None:
        """Take a block out."""
        block.older.newer, block.newer.older = block.newer, block.older
        block.ring = None
        self.bytes -= block.bytes

    def _link(self, block: Block, older: Block) -> None:
        block.older, block.newer = older, older.newer
        older.newer.older = block
        older.newer = block
        block.ring = self
        self.bytes += block.bytes


class Shelf:
    """The blocks of one group of one model.

    folder   path under the root
    is_full  blocks need their parents
    """

    __slots__ = ("blocks", "folder", "is_full")

    def __init__(self, folder: str, is_full: bool) -> None:
        self.folder, self.is_full = folder, is_full
        self.blocks: dict[bytes, Block] = {}

    def __repr__(self) -> str:
        return f"<Shelf {self.folder}, {len(self.blocks)} blocks>"


class PrefixIndex:
    """Every block under one root."""

    def __init__(self) -> None:
        # mutable state, changed only in the methods below
        self.shelves: dict[str, Shelf] = {}
        self.fresh, self.kept = Ring(), Ring()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._sizes: dict[int, int] = {}  # one int object for each size: blocks are many
        self.count = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {self.count} blocks, {self.total_bytes} bytes>"

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks here (I4)."""
        return self.fresh.bytes + self.kept.bytes

    def shelf(self, folder: str) -> Shelf:
        """Return the shelf of a group's folder, made if there is none."""
        found = self.shelves.get(folder)
        if found is None:
            found = self.shelves[folder] = Shelf(folder, "-full-" in folder)
        return found

    def add(self, shelf: Shelf, chain_hash: bytes, size: int, parent: bytes | None) -> Block | None:
        """Add a block that was written; None if its parent is not here (I1).

        parent  chain hash of the block before; None for a first block and in sliding groups
        """
        known = shelf.blocks.get(chain_hash)
        if known is not None:
            return known
        above = None
        if parent is not None:
            above = shelf.blocks.get(parent)
            if above is None:
                return None
        block = self._link(shelf, chain_hash, size, above)
        again = chain_hash in self._ghosts
        if again:
            del self._ghosts[chain_hash]
        self._place(block, self.kept if again else self.fresh)
        return block

    def recall(
        self, shelf: Shelf, chain_hash: bytes, size: int, parent: bytes | None, ring: Ring
    ) -> Block | None:
        """Add a block as the oldest of a ring; None if its parent is not here (I1).

        Parents come before their children, and no later in ``fresh`` than the child in ``kept``.
        """
        above = shelf.blocks.get(parent) if parent is not None else None
        if chain_hash in shelf.blocks or (parent is not None and above is None):
            return shelf.blocks.get(chain_hash)
        block = self._link(shelf, chain_hash, size, above)
        if above is not None and above.ring is not self.kept:
            ring = self.fresh
        ring.prepend(block)
        return block

    def snapshot(self) -> Iterator[tuple[Block, bool]]:
        """Iterate over every block, parents first, newest first in each ring, and if it is kept."""
        for ring in (self.kept, self.fresh):
            for block in ring.newest_first():
                yield block, ring is self.kept

    def load(self, found: Sequence[FoundBlock]) -> list[FoundBlock]:
        """Add the blocks of a scan to an empty index, by age; return those without a parent (I1).

        A block counts as used when the latest block behind it was written (I2).
        """
        used_ns = {(one.folder, one.chain_hash): one.mtime_ns for one in found}
        deepest_first = sorted(found, key=lambda one: -one.first_token)
        for one in deepest_first:
            above = (one.folder, one.parent)
            if above in used_ns:
                used_ns[above] = max(used_ns[above], used_ns[one.folder, one.chain_hash])
        orphans = [one for one in reversed(deepest_first) if not self._shelve(one)]
        by_age = sorted(
            found, key=lambda one: (used_ns[one.folder, one.chain_hash], -one.first_token)
        )
        for one in by_age:
            block = self.shelf(one.folder).blocks.get(one.chain_hash)
            if block is not None:
                self.fresh.append(block)
        return orphans

    def clear(self) -> None:
        """Take every block out; shelves stay, empty."""
        for shelf in self.shelves.values():
            for block in shelf.blocks.values():
                block.ring = block.children = None
            shelf.blocks.clear()
        self.fresh, self.kept, self.count = Ring(), Ring(), 0

    def use(self, tips: Iterable[Block]) -> None:
        """A request uses these blocks and everything above them: they are kept (I2).

        Blocks that left the index meanwhile are passed over.
        """
        for block in tips:
            if block.ring is not None:
                self._keep(block)

    def pin(self, tips: Iterable[Block]) -> None:
        """A read of these blocks and of everything above them begins (I3)."""
        for block in tips:
            block.pins += 1

    def unpin(self, tips: Iterable[Block]) -> None:
        """A read ended."""
        for block in tips:
            assert block.pins > 0, "a pin is taken back once"
            block.pins -= 1

    def victims(self, size: int) -> list[Block]:
        """Take out blocks of ``size`` bytes or more, children first; fewer if no more can go.

        The caller removes their files.
        """
        found: list[Block] = []
        freed = 0
        while freed < size:
            block = self._victim()
            if block is None:
                break
            self._take(block)
            self._remember(block.chain_hash)
            freed += block.bytes
            found.append(block)
        return found

    def forget(self, block: Block) -> list[Block]:
        """Take a block and everything that follows it out; children come before parents.

        Pins do not hold it: its file is bad or gone.  The caller removes the files.
        """
        if block.ring is None:
            return []
        order = [block]
        for above in order:
            order.extend(above.each_child())
        order.reverse()
        for one in order:
            self._take(one)
        return order

    def _victim(self) -> Block | None:
        rings = (self.fresh, self.kept)
        if self.fresh.bytes < FRESH_SHARE * self.total_bytes:
            rings = (self.kept, self.fresh)
        for ring in rings:
            for seen, block in enumerate(ring):
                if block.children is None and not block.pins:
                    return block
                if seen >= LOOK_AHEAD and ring is rings[0]:
                    break
        return None

    def _shelve(self, one: FoundBlock) -> bool:
        shelf = self.shelf(one.folder)
        above = None
        if shelf.is_full and one.first_token:
            above = shelf.blocks.get(one.parent)
            if above is None:
                return False
        if one.chain_hash not in shelf.blocks:
            self._link(shelf, one.chain_hash, one.bytes, above)
        return True

    def _link(self, shelf: Shelf, chain_hash: bytes, size: int, above: Block | None) -> Block:
        block = Block(shelf, chain_hash, self._sizes.setdefault(size, size), above)
        shelf.blocks[chain_hash] = block
        self.count += 1
        if above is not None:
            _adopt(above, block)
        return block

    def _keep(self, block: Block) -> None:
        """Make a block and everything above it the latest, the highest last (I2)."""
        one: Block | None = block
        while one is not None:
            assert one.ring is not None, "the block is in the index"
            one.ring.take(one)
            self.kept.append(one)
            one = one.parent

    def _place(self, block: Block, ring: Ring) -> None:
        """Put a new block into a ring: just before its parent, which a request uses now (I2)."""
        above = block.parent
        if above is not None and ring is self.kept and above.ring is not ring:
            self._keep(above)
        if above is not None and above.ring is ring:
            ring.insert_below(block, above)
        else:
            ring.append(block)

    def _take(self, block: Block) -> None:
        assert block.children is None, "children go before their parents"
        assert block.ring is not None, "a block is taken out once"
        block.ring.take(block)
        del block.shelf.blocks[block.chain_hash]
        self.count -= 1
        if block.parent is not None:
            _disown(block.parent, block)

    def _remember(self, chain_hash: bytes) -> None:
        self._ghosts[chain_hash] = None
        while len(self._ghosts) > max(GHOSTS_MIN, self.count):
            self._ghosts.popitem(last=False)


def _adopt(parent: Block, child: Block) -> None:
    if parent.children is None:
        parent.children = child
    elif isinstance(parent.children, Block):
        parent.children = {parent.children: None, child: None}
    else:
        parent.children[child] = None


def _disown(parent: Block, child: Block) -> None:
    if parent.children is child:
        parent.children = None
    elif isinstance(parent.children, dict):
        del parent.children[child]
        if len(parent.children) == 1:
            parent.children = next(iter(parent.children))
