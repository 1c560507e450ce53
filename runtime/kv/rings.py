"""Blocks, their trees, and the rings that order them by last use.  Pure; see ``index``."""

from __future__ import annotations

from collections.abc import Iterator


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


def adopt(parent: Block, child: Block) -> None:
    """Note that ``child`` follows ``parent``."""
    if parent.children is None:
        parent.children = child
    elif isinstance(parent.children, Block):
        parent.children = {parent.children: None, child: None}
    else:
        parent.children[child] = None


def disown(parent: Block, child: Block) -> None:
    """Note that ``child``, which followed ``parent``, went."""
    if parent.children is child:
        parent.children = None
    elif isinstance(parent.children, dict):
        del parent.children[child]
        if len(parent.children) == 1:
            parent.children = next(iter(parent.children))
