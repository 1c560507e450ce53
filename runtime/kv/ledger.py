"""What one process knows of a spill root: the state that the journal's records make.  Pure.

Invariants

(I1) The state is a function of what an open found and of the records since: every process that has
     applied the same records has the same blocks, intents and bytes.
(I2) The parent of a block that some writer intends to write is pinned until that intent ends.
(I3) ``used_bytes`` counts every byte under the root: blocks, intents, the quarantine, files that
     could not be removed, the journal, and the rest that an open found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millpond.runtime.kv.index import Block, PrefixIndex
from millpond.runtime.kv.journal import KEPT, OLDER, Kind, Record

NO_PARENT = bytes(32)
FAR = 2.0**64  # later than any hold ends, in seconds


@dataclass(slots=True)
class _Intent:
    """A reservation of one writer, and the block that it pins."""

    record: Record
    parent: Block | None


class Ledger:
    """Index, intents and bytes of one root; the caller holds the root's guard."""

    def __init__(self) -> None:
        # mutable state, changed only in the methods below and by the root
        self.index = PrefixIndex()
        self.aside_bytes = self.other_bytes = self.journal_bytes = 0
        self.doomed: dict[str, int] = {}  # files out of the index that could not be removed
        self._intents: dict[str, _Intent] = {}

    @property
    def used_bytes(self) -> int:
        """Every byte that counts against the budget (I3)."""
        files = self.index.total_bytes + self.reserved_bytes + sum(self.doomed.values())
        return files + self.aside_bytes + self.other_bytes + self.journal_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that writers intend to write."""
        return sum(intent.record.bytes for intent in self._intents.values())

    def intents(self) -> dict[str, Record]:
        """Return what each writer intends to write, by its token."""
        return {token: intent.record for token, intent in self._intents.items()}

    def apply(self, record: Record) -> None:
        """Change the state as a record says."""
        match record.kind:
            case Kind.BLOCK:
                self._end_intent(record.token)
                shelf = self.index.shelf(record.folder)
                parent = record.parent if shelf.is_full and record.first_token else None
                self.index.add(shelf, record.chain_hash, record.bytes, parent)
            case Kind.INTENT:
                self._end_intent(record.token)
                self._begin_intent(record)
            case Kind.RELEASE:
                self._end_intent(record.token)
            case Kind.GONE:
                block = self.find(record)
                if block is not None:
                    self.index.forget(block)
            case Kind.USED:
                block = self.find(record)
                if block is not None:
                    self.index.use((block,))
            case Kind.HOLD:
                block = self.find(record)
                if block is not None and record.until:
                    self.index.hold(block, record.until)
                elif block is not None:
                    self.index.release(block)
            case Kind.ASIDE:
                self.aside_bytes = record.bytes
            case Kind.FOLDER:
                raise AssertionError("folders are resolved by the codec")

    def apply_all(self, records: Iterable[Record]) -> None:
        """Change the state as records say; a new generation's blocks are taken the short way."""
        index, shelves = self.index, self.index.shelves
        for record in records:
            if not record.flags & OLDER:
                self.apply(record)
                continue
            shelf = shelves.get(record.folder) or index.shelf(record.folder)
            parent = record.parent if record.first_token and shelf.is_full else None
            ring = index.kept if record.flags & KEPT else index.fresh
            index.recall(shelf, record.chain_hash, record.bytes, parent, ring)

    def find(self, record: Record) -> Block | None:
        """Return the block that a record names, None if it is not here."""
        shelf = self.index.shelves.get(record.folder)
        return shelf.blocks.get(record.chain_hash) if shelf is not None else None

    def snapshot(self) -> Iterator[Record]:
        """Iterate over records that make this state, parents before children."""
        for block, is_kept in self.index.snapshot():
            flags = OLDER | (KEPT if is_kept else 0)
            yield block_record(block, flags)
        for intent in self._intents.values():
            yield intent.record
        yield from self._holds()
        yield Record(Kind.ASIDE, bytes=self.aside_bytes)

    def resync(self, records: Iterable[Record]) -> list[Block]:
        """Become what a whole generation of records makes; keep what is here of it in place.

        Returns the blocks that are here and unknown to the generation; they stay.
        """
        other = Ledger()
        other.apply_all(records)
        self.apply_all(
            block_record(block, OLDER | (KEPT if is_kept else 0))
            for block, is_kept in other.index.snapshot()
        )
        self.index.release_expired(FAR)
        self.apply_all(other._holds())
        for token in tuple(self._intents):
            self._end_intent(token)
        for intent in other.intents().values():
            self._begin_intent(intent)
        self.aside_bytes = other.aside_bytes
        return [
            block
            for folder, shelf in self.index.shelves.items()
            for block in shelf.blocks.values()
            if block.chain_hash not in other.index.shelf(folder).blocks
        ]

    def clear(self) -> None:
        """Forget everything; shelves stay, empty."""
        self.index.clear()
        self._intents.clear()
        self.doomed.clear()
        self.aside_bytes = self.other_bytes = self.journal_bytes = 0

    def take_over(self, other: Ledger) -> None:
        """Become what an open found; this ledger is empty."""
        if not self.index.shelves:
            self.index = other.index
        else:
            self.resync(other.snapshot())
        self._intents = other._intents
        self.aside_bytes, self.other_bytes = other.aside_bytes, other.other_bytes
        self.journal_bytes = other.journal_bytes

    def _holds(self) -> Iterator[Record]:
        for block, until in self.index.held_tips():
            yield hold_record(block, until)

    def _begin_intent(self, record: Record) -> None:
        shelf = self.index.shelf(record.folder)
        parent = shelf.blocks.get(record.parent) if shelf.is_full else None
        if parent is not None:
            self.index.pin((parent,))
        self._intents[record.token] = _Intent(record, parent)

    def _end_intent(self, token: str) -> None:
        intent = self._intents.pop(token, None)
        if intent is not None and intent.parent is not None:
            self.index.unpin((intent.parent,))


def block_record(block: Block, flags: int = 0) -> Record:
    """Return the record that adds a block; its position is 0, or 1 for any behind the first."""
    folder, parent = block.shelf.folder, block.parent
    if parent is None:
        return Record(Kind.BLOCK, folder, block.chain_hash, NO_PARENT, 0, block.bytes, "", flags)
    return Record(
        Kind.BLOCK, folder, block.chain_hash, parent.chain_hash, 1, block.bytes, "", flags
    )


def gone_record(block: Block) -> Record:
    """Return the record that takes a block out."""
    return Record(Kind.GONE, block.shelf.folder, block.chain_hash)


def hold_record(block: Block, until: int) -> Record:
    """Return the record that holds a block until a time, or with 0 lets go of it."""
    return Record(Kind.HOLD, block.shelf.folder, block.chain_hash, until=until)
