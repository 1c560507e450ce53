"""``Books``: the ledger, the journal and the files of a root, kept in step under the root's lock.

Invariants

(I1) Every decision is made under the root's lock, on a state that has seen every record: leaves
     first, whoever wrote them, and within the budget of all processes together.
(I2) A block leaves the index before its file is removed, and its bytes count until it is.
(I3) A writer that is gone holds no reservation: its lock tells, never its process id.
(I4) ``guard`` is held for moments only, never over a file operation: the event loop takes it too.

Every method blocks and runs on the disk thread that writes; those with ``records`` run inside of a
transaction and add what they did to that list.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from millpond.runtime.errors import SpillFailed, SpillFull
from millpond.runtime.kv.disk import JOURNAL, Disk
from millpond.runtime.kv.files import TEMP_SUFFIX, discard, quarantine
from millpond.runtime.kv.header import block_path
from millpond.runtime.kv.index import Block
from millpond.runtime.kv.journal import Journal, Kind, Record
from millpond.runtime.kv.ledger import Ledger, gone_record, hold_record
from millpond.runtime.kv.root_options import RootOptions

QUARANTINE_SHARE = 8  # at most this part of the budget lies in quarantine
HELD_SHARE = 2  # at most this part of the budget is pinned for a time
HOLD_BYTES = 64  # of the record
FLOOR_SHARE = 20  # the floor of free space is at most this part of a small file system
JOURNAL_SHARE = 64  # a journal may hold this part of the budget in outdated records
JOURNAL_SLACK_MIN, JOURNAL_SLACK_MAX = 2**12, 2**20
PROBE_BYTES = 512  # written to see whether a disk can be; the budget is kept this much short
RECORDS_BYTES = 512  # room for the records of one block
USE_BYTES, USES_MAX = 48, 64  # uses that wait for the next transaction


class Figures:
    """What this process removed, ever."""

    def __init__(self) -> None:
        # mutable state, changed under the guard
        self.evicted_blocks = self.evicted_bytes = self.quarantined_blocks = 0


class Books:
    """One process's share in a root's bookkeeping."""

    def __init__(self, disk: Disk, options: RootOptions) -> None:
        self.disk, self.options = disk, options
        self.guard = threading.Lock()
        self.bytes_max = max(0, options.bytes_max - 2 * PROBE_BYTES)
        self.quarantine_bytes_max = min(
            options.quarantine_bytes_max, options.bytes_max // QUARANTINE_SHARE
        )
        # mutable state, changed under the guard; the journal under the root's lock
        self.ledger = Ledger()
        self.figures = Figures()
        self.uses: deque[Record] = deque(maxlen=USES_MAX)
        self.journal = Journal(disk, options.token)
        self._compacted_bytes = 0

    @contextmanager
    def transaction(self) -> Iterator[list[Record]]:
        """Hold the root's lock with everything applied; write the records that the body leaves.

        Raises SpillFailed if the root is not what was opened, OSError as the system does.
        """
        with self.disk.lock():
            self._catch_up()
            records: list[Record] = []
            try:
                yield records
            finally:
                self._append(records)

    def apply(self, record: Record, records: list[Record]) -> None:
        """Change the ledger and leave the record."""
        with self.guard:
            self.ledger.apply(record)
        records.append(record)

    def make_room(self, size: int, records: list[Record]) -> None:
        """Evict until ``size`` bytes fit.

        Raises SpillFull if the budget never has room for them, SpillFailed (ENOSPC) if the file
        system has none above its floor.
        """
        size += RECORDS_BYTES + USE_BYTES * len(self.uses)
        self.remove_doomed()
        with self.guard:
            self.ledger.index.release_expired(self.options.now())
        if max(self._over(size), self._short(size)) > 0:
            self._settle_intents(records)
        while (lack := max(over := self._over(size), short := self._short(size))) > 0:
            if lack <= self.ledger.index.loose_bytes and self.evict(lack, records):
                continue
            if short > 0:
                words = f"{short} bytes too few are free on the file system"
                raise SpillFailed("write", "a block", OSError(errno.ENOSPC, words))
            raise SpillFull(f"{over} bytes more than the budget")

    def hold(self, tips: Collection[Block], until: int, records: list[Record]) -> bool:
        """Hold blocks until a time, with everything above them; False if that were too much.

        Raises as ``make_room`` does, for the room that the journal takes.
        """
        index = self.ledger.index
        with self.guard:
            index.release_expired(self.options.now())
            tips = [block for block in tips if block.ring is not None]
            if index.held.bytes + index.hold_bytes(tips) > self._held_bytes_max:
                return False
            index.pin(tips)
        try:
            self.make_room(HOLD_BYTES * len(tips), records)
        finally:
            with self.guard:
                index.unpin(tips)
        for block in tips:
            self.apply(hold_record(block, until), records)
        return True

    def release(self, tips: Collection[Block], records: list[Record]) -> None:
        """Let go of blocks, and of those above them that were held for them only."""
        for block in tips:
            if block.ring is not None and self.ledger.index.held_until(block):
                self.apply(hold_record(block, 0), records)

    def limit_held(self) -> bool:
        """Let go of the holds that end first while all of them are too much; True iff any did."""
        index, is_over = self.ledger.index, False
        with self.guard:
            index.release_expired(self.options.now())
            while index.held.bytes > self._held_bytes_max:
                index.release(index.held_tips()[0][0])
                is_over = True
        return is_over

    @property
    def _held_bytes_max(self) -> int:
        return self.options.bytes_max // HELD_SHARE

    def evict(self, size: int, records: list[Record]) -> int:
        """Remove blocks of ``size`` bytes or more, as far as there are any; return their count."""
        with self.guard:
            victims = self.ledger.index.victims(size)
            self.figures.evicted_blocks += len(victims)
            self.figures.evicted_bytes += sum(block.bytes for block in victims)
        self.remove(victims, records)
        return len(victims)

    def remove(self, blocks: Sequence[Block], records: list[Record]) -> None:
        """Remove the files of blocks that left the index.

        Raises SpillFailed if a file stays; it counts until a later try (I2).
        """
        problem: OSError | None = None
        with self.guard:
            self.ledger.doomed.update((path_of(block), block.bytes) for block in blocks)
        for block in blocks:
            try:
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(path_of(block))
            except OSError as error:
                problem = error
                continue
            with self.guard:
                self.ledger.doomed.pop(path_of(block), None)
            records.append(gone_record(block))
        if problem is not None:
            raise SpillFailed("remove", "a block", problem)

    def set_aside(self, block: Block, verdict: tuple[str, str], records: list[Record]) -> None:
        """Move the file of a block that left the index to quarantine.  Raises OSError."""
        reason, detail = verdict
        path = path_of(block)
        with self.guard:
            self.ledger.doomed[path] = block.bytes
        held = quarantine(self.disk, path, reason, detail, self.quarantine_bytes_max)
        with self.guard:
            del self.ledger.doomed[path]
            self.figures.quarantined_blocks += 1
        self.apply(Record(Kind.ASIDE, bytes=held), records)
        records.append(gone_record(block))

    def discard(self, path: str, size: int) -> None:
        """Remove a file that is in no index; one that stays counts until a later try (I2)."""
        if not discard(self.disk, path):
            with self.guard:
                self.ledger.doomed[path] = size

    def remove_doomed(self) -> None:
        """Try again to remove what could not be removed."""
        for path, size in tuple(self.ledger.doomed.items()):
            with self.guard:
                del self.ledger.doomed[path]
            self.discard(path, size)

    def rewrite(self) -> None:
        """Begin a new generation of the journal from the ledger."""
        with self.guard:
            records = list(self.ledger.snapshot())
            room = self.bytes_max - self.ledger.used_bytes
        if room < self.journal.bytes:
            discard(self.disk, JOURNAL)  # no room for two; a missing journal costs time only
        try:
            self.journal.replace(records)
        except OSError:
            self.discard(self.journal.temporary, self.journal.temporary_bytes)
            raise
        self._compacted_bytes = self.journal.bytes
        self._note_size()

    def _catch_up(self) -> None:
        """Apply what other processes did; begin a new journal where the old one is broken."""
        if not self.disk.is_attached():
            lost = OSError(errno.ENOENT, "the folder was moved, removed or replaced")
            raise SpillFailed("find", "the spill root", lost)
        tail = self.journal.read()
        unknown: list[Block] = []
        with self.guard:
            if tail.is_whole:
                unknown = self.ledger.resync(tail.records)
            else:
                self.ledger.apply_all(tail.records)
        for block in unknown:
            if not self._exists(path_of(block)):
                with self.guard:
                    self.ledger.index.forget(block)
        self._note_size()
        if tail.is_broken or unknown:
            self.rewrite()

    def _append(self, records: list[Record]) -> None:
        with self.guard:
            uses = list(self.uses)
            self.uses.clear()
            if self.ledger.used_bytes + USE_BYTES * len(uses) > self.bytes_max:
                uses = []
        self.journal.append((*records, *uses))
        slack = min(JOURNAL_SLACK_MAX, self.options.bytes_max // JOURNAL_SHARE)
        if self.journal.bytes > 2 * self._compacted_bytes + max(slack, JOURNAL_SLACK_MIN):
            self.rewrite()
        self._note_size()

    def _note_size(self) -> None:
        with self.guard:
            self.ledger.journal_bytes = self.journal.file_bytes

    def _over(self, size: int) -> int:
        """Bytes over the budget with ``size`` more."""
        with self.guard:
            return self.ledger.used_bytes + size - self.bytes_max

    def _short(self, size: int) -> int:
        """Bytes that ``size`` more would take from the floor of free space."""
        floor = min(self.options.free_bytes_min, self.disk.total_bytes() // FLOOR_SHARE)
        return floor + size - self.disk.free_bytes()

    def _settle_intents(self, records: list[Record]) -> None:
        """End the intents of writers that are gone (I3)."""
        for token, intent in self.ledger.intents().items():
            if token == self.options.token or self.disk.writer_lives(token):
                continue
            path = block_path(intent.folder, intent.chain_hash)
            for entry in self._listed(path.rpartition("/")[0]):
                name = path.rpartition("/")[2]
                if entry.startswith(f"{name}.{token}.") and entry.endswith(TEMP_SUFFIX):
                    self.discard(f"{path.rpartition('/')[0]}/{entry}", intent.bytes)
            if self._exists(path) and self.ledger.find(intent) is None:
                self.discard(path, intent.bytes)  # it got its name, and nobody knows of it
            self.apply(Record(Kind.RELEASE, token=token), records)

    def _listed(self, folder: str) -> list[str]:
        try:
            return [entry.name for entry in self.disk.scan(folder)]
        except FileNotFoundError:
            return []

    def _exists(self, path: str) -> bool:
        try:
            self.disk.read_into(path, 0, memoryview(bytearray(1)))
        except FileNotFoundError:
            return False
        return True


def path_of(block: Block) -> str:
    """Return the path of a block's file under the root."""
    return block_path(block.shelf.folder, block.chain_hash)
