"""Blocks that callers pinned for a time, as operators see them.  Every function blocks."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.disk import JOURNAL, Disk
from millpond.runtime.kv.journal import Journal
from millpond.runtime.kv.ledger import Ledger
from millpond.runtime.kv.root import SpillRoot


@dataclass(frozen=True, slots=True)
class PinnedTip:
    """The last block of a pinned chain, and seconds since 1970 at which the pin ends."""

    folder: str
    chain_hash: str
    until: int


def pinned_tips(disk: Disk) -> list[PinnedTip]:
    """Return what the journal says is pinned; changes nothing, so it may be just outdated.

    Raises OSError as the system does.
    """
    if all(entry.name != JOURNAL for entry in disk.scan("")):
        return []
    ledger = Ledger()
    ledger.apply_all(Journal(disk, "reader").read().records)
    return [
        PinnedTip(block.shelf.folder, block.chain_hash.hex(), until)
        for block, until in ledger.index.held_tips()
    ]


def unpin(root: SpillRoot, tip: str) -> int:
    """Let go of one pinned chain by its last block (hex), or of all for ""; return how many.

    Raises BlockError if no such block is pinned, SpillFailed if it cannot be written down.
    """
    with root.guard:
        tips = [block for block, _ in root.index.held_tips()]
    if tip:
        tips = [block for block in tips if block.chain_hash.hex() == tip]
        if not tips:
            raise BlockError(f"pinned block: found none of the name {tip:.64}")
    problem = root.hold(tips, 0, 0.0)
    if problem:
        raise SpillFailed("write", "the journal", OSError(5, problem))
    return len(tips)
