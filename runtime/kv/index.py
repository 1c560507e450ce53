"""The prefix index: which blocks are on disk, and which go first.  Pure; event loop only.

A *shelf* is one model's group folder.  Blocks of a full group form trees by their parents; blocks
of a sliding group stand alone.

Invariants

(I1) No block of a full group is here without its parent.
(I2) Other blocks lie in two rings, each ordered by last use.  Every use of a block counts as a
     later use of its parent, and a block in ``kept`` has its parent there too, or in ``held``: so
     in each ring a block is nearer to the old end than its parent, and the oldest block of
     ``fresh`` has no children.
(I3) A pinned block, whose file is being read, is no victim; nor is any block above it.
(I4) ``total_bytes`` is the sum over the blocks here.
(I5) Blocks that a caller pinned for a time lie in a third ring, ``held``, with everything above
     them, which is held as long at least; no victim comes from there.

Policy: 2Q (Johnson & Shasha, VLDB 1994) on trees.  A block enters ``fresh``; once a request reads
it, or it is written again soon after it went, it moves to ``kept``.  Victims come from ``fresh``
while that holds more than ``FRESH_SHARE`` of the bytes, so one-off prompts push each other out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from millpond.runtime.kv.rings import Block, Ring, Shelf, adopt, disown

__all__ = ["Block", "FoundBlock", "PrefixIndex", "Ring", "Shelf"]

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


class PrefixIndex:
    """Every block under one root."""

    def __init__(self) -> None:
        # mutable state, changed only in the methods below
        self.shelves: dict[str, Shelf] = {}
        self.fresh, self.kept, self.held = Ring(), Ring(), Ring()
        self._until: dict[Block, int] = {}  # of held blocks
        self._soonest = 0  # no hold is over before
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._sizes: dict[int, int] = {}  # one int object for each size: blocks are many
        self.count = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {self.count} blocks, {self.total_bytes} bytes>"

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks here (I4)."""
        return self.fresh.bytes + self.kept.bytes + self.held.bytes

    @property
    def loose_bytes(self) -> int:
        """Bytes of the blocks that no pin for a time holds."""
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
        if above is not None and above.ring is self.fresh:
            ring = self.fresh
        ring.prepend(block)
        return block

    def snapshot(self) -> Iterator[tuple[Block, bool]]:
        """Iterate over every block, parents first, newest first in each ring, and if it is kept.

        Held ones count as kept; ``held_tips`` tells which they are.
        """
        for ring in (self.held, self.kept, self.fresh):
            for block in ring.newest_first():
                yield block, ring is not self.fresh

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
        self.fresh, self.kept, self.held, self.count = Ring(), Ring(), Ring(), 0
        self._until.clear()

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

    def hold(self, block: Block, until: int) -> None:
        """Keep a block and everything above it until a time at least (I5)."""
        chain: list[Block] = []
        one: Block | None = block
        while one is not None and self._until.get(one, 0) < until:
            chain.append(one)
            one = one.parent
        for one in reversed(chain):
            if one.ring is not None and one.ring is not self.held:
                one.ring.take(one)
                if one.parent is not None:
                    self.held.insert_below(one, one.parent)
                else:
                    self.held.append(one)
            self._until[one] = until
        self._soonest = min(self._soonest, until)

    def hold_bytes(self, tips: Iterable[Block]) -> int:
        """Return how many more bytes would be held if these were."""
        fresh: dict[Block, None] = {}
        for block in tips:
            one: Block | None = block
            while one is not None and one not in self._until and one not in fresh:
                fresh[one] = None
                one = one.parent
        return sum(block.bytes for block in fresh)

    def release(self, block: Block) -> None:
        """End a hold, of those above too that were held for this one: as long, and for no other."""
        until = self._until.get(block, 0)
        one: Block | None = block
        while one is not None and self._until.get(one) == until and not self._holds_below(one):
            self._release(one)
            one = one.parent

    def release_expired(self, now: float) -> None:
        """End every hold whose time is over."""
        if now < self._soonest:
            return
        for block in self.held:  # children come before their parents
            if self._until[block] <= now:
                self._release(block)
        self._soonest = min(self._until.values(), default=2**63)

    def held_tips(self) -> list[tuple[Block, int]]:
        """Return the holds that imply all others, and until when; soonest over first."""
        tips = [
            (block, until)
            for block, until in self._until.items()
            if all(self._until.get(child, 0) < until for child in block.each_child())
        ]
        return sorted(tips, key=lambda tip: (tip[1], tip[0].chain_hash))

    def held_until(self, block: Block) -> int:
        """Return until when a block is held, 0 if it is not."""
        return self._until.get(block, 0)

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
        if self.fresh.bytes < FRESH_SHARE * (self.fresh.bytes + self.kept.bytes):
            rings = (self.kept, self.fresh)
        for ring in rings:
            for seen, block in enumerate(ring):
                if block.children is None and not block.pins:
                    return block
                if seen >= LOOK_AHEAD and ring is rings[0]:
                    break
        return None

    def _holds_below(self, block: Block) -> bool:
        return any(child in self._until for child in block.each_child())

    def _release(self, block: Block) -> None:
        del self._until[block]
        self.held.take(block)
        self.kept.append(block)

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
            adopt(above, block)
        return block

    def _keep(self, block: Block) -> None:
        """Make a block and everything above it the latest, the highest last (I2)."""
        one: Block | None = block
        while one is not None and one.ring is not self.held:
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
        self._until.pop(block, None)
        del block.shelf.blocks[block.chain_hash]
        self.count -= 1
        if block.parent is not None:
            disown(block.parent, block)

    def _remember(self, chain_hash: bytes) -> None:
        self._ghosts[chain_hash] = None
        while len(self._ghosts) > max(GHOSTS_MIN, self.count):
            self._ghosts.popitem(last=False)
