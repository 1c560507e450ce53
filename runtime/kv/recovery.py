"""Opening a root: what the journal says, checked against what the folders hold.

Blocks: on a disk thread, under the root's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.runtime.errors import BlockError
from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.header import block_path
from millpond.runtime.kv.index import FoundBlock
from millpond.runtime.kv.journal import Journal, Kind, Record
from millpond.runtime.kv.ledger import Ledger
from millpond.runtime.kv.scan import Progress, RootScan, scan_root, sweep


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an open found.

    ledger    the state, within no budget yet
    orphans   paths of blocks without their parent, to be removed
    bad       paths of files in a block's place that are none, to be set aside
    is_stale  the journal does not say this, or is broken
    """

    ledger: Ledger
    orphans: list[str]
    bad: list[tuple[str, BlockError]]
    is_stale: bool


def recover(disk: Disk, journal: Journal, progress: Progress | None) -> Recovered:
    """Read the journal, walk the folders, sweep what dead writers left.

    progress  called with the count of headers read so far; none is read where the journal knows

    Raises OSError as the system does.
    """
    ledger = Ledger()
    tail = journal.read()
    ledger.apply_all(tail.records)
    found = scan_root(disk, progress, ledger.index)
    sweep(disk, found)
    is_stale = _settle(disk, ledger) or tail.is_broken
    ledger.other_bytes = found.other_bytes
    before = ledger.index.count
    orphans = _drop_missing(ledger, found)
    is_stale = is_stale or ledger.index.count < before or bool(found.blocks)
    orphans += _add_unknown(ledger, found.blocks)
    ledger.journal_bytes = journal.file_bytes
    return Recovered(ledger, orphans, found.bad, is_stale)


def _settle(disk: Disk, ledger: Ledger) -> bool:
    """End the intents of writers that are gone; their files are found by the walk."""
    gone = [token for token in ledger.intents() if not disk.writer_lives(token)]
    for token in gone:
        ledger.apply(Record(Kind.RELEASE, token=token))
    return bool(gone)


def _drop_missing(ledger: Ledger, found: RootScan) -> list[str]:
    """Forget blocks without a file; return the paths of those behind them that have one."""
    orphans: list[str] = []
    for folder, shelf in ledger.index.shelves.items():
        seen = found.seen.get(folder, set())
        for block in [one for name, one in shelf.blocks.items() if name not in seen]:
            for gone in ledger.index.forget(block):
                if gone.chain_hash in seen:
                    orphans.append(block_path(folder, gone.chain_hash))
    return orphans


def _add_unknown(ledger: Ledger, blocks: list[FoundBlock]) -> list[str]:
    """Add blocks that the journal does not know; return the paths of those without a parent."""
    if not ledger.index.count:
        orphans = ledger.index.load(blocks)
        return [block_path(one.folder, one.chain_hash) for one in orphans]
    paths: list[str] = []
    for one in sorted(blocks, key=lambda one: (one.first_token, one.mtime_ns, one.chain_hash)):
        shelf = ledger.index.shelf(one.folder)
        parent = one.parent if shelf.is_full and one.first_token else None
        if ledger.index.add(shelf, one.chain_hash, one.bytes, parent) is None:
            paths.append(block_path(one.folder, one.chain_hash))
    return paths
