"""``SpillRoot``: one folder of block files, shared by the houses of a process and by processes.

Invariants

(I1) No write begins before its bytes are reserved within ``bytes_max``, and above the floor of free
     space, in the journal that all processes share.  Bytes are written outside of the root's lock.
(I2) A block is in the index only once its file has its name.
(I3) After a write failed, spilling is off (``problem`` says why) until a probe succeeds; reading
     goes on.

Methods marked *blocks* run on one disk thread, the same for all houses of the root.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from millpond.runtime.config import parse_bytes
from millpond.runtime.errors import SpillFailed, SpillFull
from millpond.runtime.kv.books import HOLD_BYTES, PROBE_BYTES, Books
from millpond.runtime.kv.disk import Disk, PosixDisk
from millpond.runtime.kv.files import TEMP_SUFFIX, Draft, quarantine, trim_quarantine
from millpond.runtime.kv.index import Block, PrefixIndex, Shelf
from millpond.runtime.kv.journal import Journal, Kind, Record
from millpond.runtime.kv.namespaces import by_namespace
from millpond.runtime.kv.recovery import recover
from millpond.runtime.kv.root_options import RootOptions, RootStatistics
from millpond.runtime.kv.scan import Progress
from millpond.runtime.kv.writing import FULL, BlockWriter, Refusal

__all__ = ["Refusal", "RootOptions", "RootStatistics", "SpillRoot", "open_spill_root"]

_log = logging.getLogger(__name__)
PROBE_S, PROBE_S_MAX = 5.0, 300.0  # first and longest wait before spilling is tried again
JOURNAL_ENTRY_BYTES = 96  # of one block in a new journal
EVICT_BYTES = 2**30  # evicted in one turn at open


class SpillRoot:
    """Accountant, evictor and index of one root; made by ``open``.

    guard    hold it while reading ``index``
    problem  why nothing is spilled; empty while spilling works
    """

    def __init__(self, disk: Disk, options: RootOptions) -> None:
        self.disk, self.options = disk, options
        self._books = Books(disk, options)
        self._writer = BlockWriter(disk, options, self._books)
        # mutable state, changed only in turn_off and try_again
        self.problem = ""
        self._retry_at, self._retry_s = 0.0, PROBE_S

    def __repr__(self) -> str:
        state = self.problem or f"{self.used_bytes / 2**30:.1f} GiB"
        return f"<SpillRoot {self.index.count} blocks, {state}>"

    @classmethod
    def open(cls, disk: Disk, options: RootOptions, progress: Progress | None = None) -> SpillRoot:
        """Claim a writer, read journal and folders, enforce the budget; blocks.

        Raises SpillFailed if the root cannot be used.
        """
        root = cls(disk, options)
        try:
            disk.claim_writer(options.token)
            try:
                root._recover(progress)
                root._probe()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                root.turn_off(_reason(error), 0.0)  # what is there can still be read
        except OSError as error:
            raise SpillFailed("open", "the spill root", error) from error
        return root

    @property
    def guard(self) -> threading.Lock:
        """Held for moments by whoever touches the index."""
        return self._books.guard

    @property
    def index(self) -> PrefixIndex:
        """The blocks that are here."""
        return self._books.ledger.index

    @property
    def used_bytes(self) -> int:
        """Every byte under the root, as far as this process knows."""
        return self._books.ledger.used_bytes

    def close(self) -> None:
        """Stop being a writer; nothing may be stored any more."""
        self.disk.close()

    def shelf(self, folder: str) -> Shelf:
        """Return the shelf of a group's folder."""
        with self.guard:
            return self.index.shelf(folder)

    def use(self, tips: Iterable[Block]) -> None:
        """A request uses these blocks and everything above them."""
        with self.guard:
            for block in tips:
                self.index.use((block,))
                record = Record(Kind.USED, block.shelf.folder, block.chain_hash)
                self._books.uses.append(record)

    def statistics(self) -> RootStatistics:
        """Return the root's figures."""
        with self.guard:
            ledger, figures = self._books.ledger, self._books.figures
            return RootStatistics(
                blocks=ledger.index.count,
                block_bytes=ledger.index.total_bytes,
                reserved_bytes=ledger.reserved_bytes,
                doomed_bytes=sum(ledger.doomed.values()),
                quarantine_bytes=ledger.aside_bytes,
                other_bytes=ledger.other_bytes + ledger.journal_bytes,
                bytes_max=self.options.bytes_max,
                evicted_blocks=figures.evicted_blocks,
                evicted_bytes=figures.evicted_bytes,
                quarantined_blocks=figures.quarantined_blocks,
                problem=self.problem,
                namespaces=by_namespace(ledger.index.shelves.values()),
                pinned_bytes=ledger.index.held.bytes,
            )

    # -- blocks

    def store(self, shelf: Shelf, draft: Draft, now: float) -> Refusal | None:
        """Publish a block; return None, or why it was not kept; blocks.

        ``off``: spilling is off; ``parent``: the block before is not there; ``full``: no room
        within the budget.  A block that is there already is kept.
        """
        if self.problem:
            return "off"
        try:
            return self._writer.store(shelf, draft)
        except (SpillFailed, OSError) as error:
            with self.guard:
                self._books.ledger.apply(Record(Kind.RELEASE, token=self.options.token))
            self.turn_off(_reason(error), now)
            return "off"

    def forget(self, block: Block, verdict: tuple[str, str] | None, now: float) -> None:
        """Take a block whose file is bad or gone out of the index, with what follows it; blocks.

        verdict  reason and detail: the file moves to quarantine; None: it is gone already
        """
        try:
            with self._books.transaction() as records:
                with self.guard:
                    gone = self.index.forget(block)
                bad = gone.pop() if gone and verdict is not None else None
                try:
                    self._books.remove(gone, records)  # what follows goes first
                finally:
                    if bad is not None and verdict is not None:
                        self._books.set_aside(bad, verdict, records)
        except (SpillFailed, OSError) as error:
            self.turn_off(_reason(error), now)

    def remove(self, block: Block) -> tuple[int, int]:
        """Remove a block and what follows it; return the files and bytes removed; blocks.

        Raises SpillFailed or OSError if a file stays.
        """
        with self._books.transaction() as records:
            with self.guard:
                gone = self.index.forget(block)
            self._books.remove(gone, records)
        return len(gone), sum(one.bytes for one in gone)

    def hold(self, tips: Collection[Block], until: int, now: float) -> str:
        """Pin blocks and all above them until a time, in whole seconds since 1970; blocks.

        until  0: no longer

        Returns why they are not pinned; empty if they are.
        """
        if self.problem:
            return f"spilling is off: {self.problem}"
        try:
            with self._books.transaction() as records:
                if not until:
                    self._books.release(tips, records)
                elif not self._books.hold(tips, until, records):
                    return "more than half of the budget would be pinned"
        except SpillFull:
            return "there is no room for it in the journal"
        except (SpillFailed, OSError) as error:
            self.turn_off(_reason(error), now)
            return f"spilling is off: {self.problem}"
        return ""

    def flush(self) -> None:
        """Write down what was used; blocks."""
        with contextlib.suppress(SpillFailed, OSError), self._books.transaction():
            pass

    # -- on and off

    def turn_off(self, reason: str, now: float) -> None:
        """Spill nothing until a probe succeeds (I3)."""
        if not self.problem:
            _log.warning("spilling is off: %s", reason)
        self.problem = reason
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, PROBE_S_MAX)

    def is_due(self, now: float) -> bool:
        """True iff spilling is off and it is time to see whether the disk recovered."""
        return bool(self.problem) and now >= self._retry_at

    def try_again(self, now: float) -> None:
        """See whether the disk recovered, and if so spill again; blocks."""
        try:
            if not self.disk.is_attached():
                self._reattach()
            self.disk.claim_writer(self.options.token)
            self._probe()
            with self._books.transaction():
                self._books.remove_doomed()
        except (SpillFailed, OSError) as error:
            self.turn_off(_reason(error), now)
            return
        _log.info("spilling is on again")
        self.problem, self._retry_s = "", PROBE_S

    # -- inside, on the disk thread

    @property
    def _probe_path(self) -> str:
        return f"probe.{self.options.token}.0{TEMP_SUFFIX}"

    def _probe(self) -> None:
        """Write and remove a small file; raises OSError."""
        with self.guard:
            size = max(0, min(PROBE_BYTES, self.options.bytes_max - self.used_bytes))
        try:
            self.disk.write(self._probe_path, (bytes(size),), self.options.sync)
        finally:
            self._books.discard(self._probe_path, size)

    def _reattach(self) -> None:
        """Take the folder that stands at the root's path now."""
        with self.guard:
            self._books.ledger.clear()
        self.disk.reattach()
        self.disk.claim_writer(self.options.token)
        self._books.journal = Journal(self.disk, self.options.token)
        self._recover(None)

    def _recover(self, progress: Progress | None) -> None:
        books, limit = self._books, self._books.quarantine_bytes_max
        with self.disk.lock():
            found = recover(self.disk, books.journal, progress)
            for path, error in found.bad:
                quarantine(self.disk, path, error.reason, str(error), limit)
            found.ledger.aside_bytes = trim_quarantine(self.disk, limit)
            with self.guard:
                books.ledger.take_over(found.ledger)
            for path in found.orphans:
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(path)
            is_stale = self._fit(books.limit_held() or found.is_stale)
            if is_stale:
                books.rewrite()
        _log.info(
            "spill root: %d blocks, %d of %d bytes; evicted %d bytes, removed %d blocks without a "
            "parent, set aside %d bad files",
            self.index.count,
            self.used_bytes,
            self.options.bytes_max,
            books.figures.evicted_bytes,
            len(found.orphans),
            len(found.bad),
        )

    def _fit(self, is_stale: bool) -> bool:
        """Evict down to the budget, a new journal included; True iff the journal must be new."""
        books, unwritten = self._books, list[Record]()
        while True:
            over = self.used_bytes - books.bytes_max
            if is_stale:  # a new one takes the old one's place
                over += JOURNAL_ENTRY_BYTES * (1 + self.index.count) - books.journal.file_bytes
                over += HOLD_BYTES * len(self.index.held_tips())
            if over <= 0:
                return is_stale
            if not is_stale:
                is_stale = True  # a compact journal may be all that it takes
            elif not books.evict(min(over, EVICT_BYTES), unwritten):
                return True


def open_spill_root(
    path: Path, bytes_max: int | str, options: RootOptions, progress: Progress | None = None
) -> SpillRoot:
    """Open a folder of the real file system as a spill root; blocks.

    bytes_max  budget, possibly a share of the file system; takes the place of the one in options

    Raises SpillFailed if it cannot be used, ConfigError on a bad budget.
    """
    try:
        disk = PosixDisk(path)
    except OSError as error:
        raise SpillFailed("open", str(path), error) from error
    try:
        budget = parse_bytes(bytes_max, disk.total_bytes())
        return SpillRoot.open(disk, replace(options, bytes_max=budget), progress)
    except BaseException:
        disk.close()
        raise


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
