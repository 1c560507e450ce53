"""``SpillRoot``: one folder of block files, shared by the houses of a process.

Invariants

(I1) Bytes of block files, of writes in progress, of files that wait for their removal, of the
     quarantine and of everything else under the root never exceed ``bytes_max``: room is made and
     reserved before a write begins.
(I2) A block is in the index only once its file has its name; it leaves the index before its file is
     removed.  So the index never promises what this process takes away.
(I3) The parent of a block that is being written is pinned.
(I4) After a write failed, spilling is off (``problem`` says why) until a probe succeeds; reading
     goes on.

Used on the event loop; what runs on a disk thread is passed to the caller's ``Worker``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from millpond.runtime.errors import EngineError, SpillFailed
from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.files import (
    Draft,
    discard,
    file_bytes,
    prepare,
    publish,
    quarantine,
    trim_quarantine,
)
from millpond.runtime.kv.header import block_path
from millpond.runtime.kv.index import Block, PrefixIndex, Shelf
from millpond.runtime.kv.scan import Progress, scan_root, sweep
from millpond.runtime.threads import Worker

_log = logging.getLogger(__name__)
PROBE_S, PROBE_S_MAX = 5.0, 300.0  # first and longest wait before spilling is tried again
PROBE_BYTES = 2**16
QUARANTINE_SHARE = 8  # at most this part of the budget lies in quarantine
REMOVALS_MAX = 64  # files removed in one turn of the disk thread
ROOM_ROUNDS = 16  # turns to make room for one block, then it is refused
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """Bounds of a root.

    token                 names this writer among all processes; not reused
    bytes_max             budget for every byte under the root
    free_bytes_min        free space of the file system that is never taken
    quarantine_bytes_max  bytes that bad files may keep
    stall_s               a file operation longer than this turns spilling off
    sync                  durability ``power``
    """

    token: str
    bytes_max: int
    free_bytes_min: int = 0
    quarantine_bytes_max: int = 0
    stall_s: float | None = None
    sync: bool = False


@dataclass(frozen=True, slots=True)
class RootStatistics:
    """Figures of a root: blocks there, bytes by use, and what was evicted and set aside ever."""

    blocks: int
    block_bytes: int
    reserved_bytes: int
    doomed_bytes: int
    quarantine_bytes: int
    other_bytes: int
    bytes_max: int
    evicted_blocks: int
    evicted_bytes: int
    quarantined_blocks: int
    problem: str


@dataclass(slots=True)
class _Doomed:
    """A file that waits for its removal; ``gone`` is set on the disk thread."""

    path: str
    bytes: int
    gone: bool = False


@dataclass(slots=True)
class _Write:
    """A write in progress; ``published`` is set on the disk thread."""

    draft: Draft
    published: bool = False


@dataclass(slots=True)
class _Figures:
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    quarantined_blocks: int = 0


class SpillRoot:
    """Accountant, evictor and index of one root; made by ``open``."""

    def __init__(self, disk: Disk, options: RootOptions) -> None:
        self.disk, self.options = disk, options
        self.quarantine_bytes_max = min(
            options.quarantine_bytes_max, options.bytes_max // QUARANTINE_SHARE
        )
        # mutable state, changed only on the event loop (and in open, before there is one)
        self.index = PrefixIndex()
        self.problem = ""
        self._reserved = self._other = self._quarantined = 0
        self._doomed: list[_Doomed] = []
        self._retry_at, self._retry_s = 0.0, PROBE_S
        self._figures = _Figures()

    def __repr__(self) -> str:
        state = self.problem or f"{self.used_bytes / 2**30:.1f} GiB"
        return f"<SpillRoot {self.index.count} blocks, {state}>"

    @classmethod
    def open(cls, disk: Disk, options: RootOptions, progress: Progress | None = None) -> SpillRoot:
        """Claim a writer, sweep, scan and enforce the budget; blocks, on a disk thread.

        Raises SpillFailed if the root cannot be used.
        """
        root = cls(disk, options)
        try:
            disk.claim_writer(options.token)
            root._probe()
            root._recover(progress)
        except OSError as error:
            raise SpillFailed("open", "the spill root", error) from error
        return root

    @property
    def used_bytes(self) -> int:
        """Every byte that counts against the budget (I1)."""
        doomed = sum(one.bytes for one in self._doomed if not one.gone)
        return self.index.total_bytes + self._reserved + doomed + self._quarantined + self._other

    def close(self) -> None:
        """Stop being a writer; nothing may be stored any more."""
        self.disk.close()

    def shelf(self, folder: str) -> Shelf:
        """Return the shelf of a group's folder."""
        return self.index.shelf(folder)

    def statistics(self) -> RootStatistics:
        """Return the root's figures."""
        return RootStatistics(
            blocks=self.index.count,
            block_bytes=self.index.total_bytes,
            reserved_bytes=self._reserved,
            doomed_bytes=sum(one.bytes for one in self._doomed if not one.gone),
            quarantine_bytes=self._quarantined,
            other_bytes=self._other,
            bytes_max=self.options.bytes_max,
            evicted_blocks=self._figures.evicted_blocks,
            evicted_bytes=self._figures.evicted_bytes,
            quarantined_blocks=self._figures.quarantined_blocks,
            problem=self.problem,
        )

    # -- writing

    async def store(self, worker: Worker, shelf: Shelf, draft: Draft, now: float) -> str:
        """Publish a block; return an empty string, or why it was not kept.

        The draft's buffers are read until this returns.  ``off``: spilling is off; ``parent``: the
        block before is not there; ``full``: no room within the budget.
        Raises EngineError if the disk thread is stuck; it may then still read the buffers.
        """
        if self.problem:
            return "off"
        parent = None
        if shelf.is_full and draft.block.first_token:
            parent = shelf.blocks.get(draft.block.parent)
            if parent is None:
                return "parent"
        pinned = (parent,) if parent is not None else ()
        self.index.pin(pinned)  # (I3)
        try:
            return await self._store(worker, shelf, draft, now)
        finally:
            self.index.unpin(pinned)

    async def forget(
        self, worker: Worker, block: Block, path: str, error: tuple[str, str] | None
    ) -> None:
        """Take a block whose file is bad or gone out of the index, with what follows it.

        error  reason and detail: the file moves to quarantine; None: it is gone already
        """
        if error is not None and block.ring is not None:
            self._figures.quarantined_blocks += 1
        doomed = [one for one in self.index.forget(block) if one is not block]
        if error is not None:
            reason, detail = error
            move = partial(quarantine, self.disk, path, reason, detail, self.quarantine_bytes_max)
            try:
                self._quarantined = await worker.call(move, self.options.stall_s)
            except OSError as failure:
                _log.warning("a bad block can be neither moved nor removed: %s", failure.strerror)
                self._other += block.bytes
        await self._remove(worker, doomed)

    # -- on and off

    def turn_off(self, reason: str, now: float) -> None:
        """Spill nothing until a probe succeeds (I4)."""
        if not self.problem:
            _log.warning("spilling is off: %s", reason)
        self.problem = reason
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, PROBE_S_MAX)

    async def try_again(self, worker: Worker, now: float) -> None:
        """If spilling is off and it is time, see whether the disk recovered."""
        if not self.problem or now < self._retry_at:
            return
        self._retry_at = now + self._retry_s
        try:
            await worker.call(self._probe, self.options.stall_s)
            await self._remove(worker, ())
        except (OSError, EngineError) as error:
            self.turn_off(_reason(error), now)
            return
        _log.info("spilling is on again")
        self.problem, self._retry_s = "", PROBE_S

    # -- inside

    async def _store(self, worker: Worker, shelf: Shelf, draft: Draft, now: float) -> str:
        size = file_bytes(draft.block)
        try:
            if not await self._make_room(worker, size):
                return "full"
            try:
                await self._write(worker, shelf, draft)
            except SpillFailed as error:
                if error.errno not in _FULL:
                    raise
                await self._remove(worker, self.index.victims(size))
                await self._write(worker, shelf, draft)
        except (SpillFailed, OSError, EngineError) as error:
            self.turn_off(_reason(error), now)
            if isinstance(error, EngineError):
                raise
            return "off"
        return "" if draft.block.chain_hash in shelf.blocks else "parent"

    async def _make_room(self, worker: Worker, size: int) -> bool:
        if self._doomed:
            await self._remove(worker, ())
        for _ in range(ROOM_ROUNDS):
            free = await worker.call(self.disk.free_bytes, self.options.stall_s)
            lack = max(
                self.used_bytes + size - self.options.bytes_max,
                self.options.free_bytes_min + size - free,
            )
            if lack <= 0:
                return True
            if lack > self.index.total_bytes:
                return False
            victims = self.index.victims(lack)
            if not victims:
                return False
            await self._remove(worker, victims)
        return False

    async def _write(self, worker: Worker, shelf: Shelf, draft: Draft) -> None:
        size = file_bytes(draft.block)
        write = _Write(draft)
        self._reserved += size
        try:
            await worker.call(partial(self._publish, write), self.options.stall_s)
        finally:  # a cancelled call that had started is over by now
            self._reserved -= size
            if write.published:
                self._add(shelf, draft, size)

    def _add(self, shelf: Shelf, draft: Draft, size: int) -> None:
        block = draft.block
        needs = shelf.is_full and block.first_token
        added = self.index.add(shelf, block.chain_hash, size, block.parent if needs else None)
        if added is None:  # its parent turned out to be bad meanwhile
            self._doomed.append(_Doomed(block.path, size))

    def _publish(self, write: _Write) -> None:
        """Disk thread."""
        prepare(self.disk, write.draft)
        publish(self.disk, write.draft)
        write.published = True

    async def _remove(self, worker: Worker, blocks: Iterable[Block]) -> None:
        """Remove the files of blocks that left the index, and of those that were left over."""
        self._doom(blocks)
        pending = list(self._doomed)
        try:
            for start in range(0, len(pending), REMOVALS_MAX):
                batch = pending[start : start + REMOVALS_MAX]
                await worker.call(partial(self._remove_files, batch), self.options.stall_s)
        finally:
            self._doomed = [one for one in self._doomed if not one.gone]

    def _remove_files(self, batch: list[_Doomed]) -> None:
        """Disk thread; raises OSError at the first file that cannot be removed."""
        for one in batch:
            if not one.gone:
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(one.path)
                one.gone = True

    def _probe(self) -> None:
        """Disk thread: write and remove a small file; raises OSError."""
        path = f"probe.{self.options.token}.0.tmp"
        try:
            self.disk.write(path, (bytes(PROBE_BYTES),), self.options.sync)
        finally:
            discard(self.disk, path)

    def _recover(self, progress: Progress | None) -> None:
        """Disk thread, at open."""
        limit = self.quarantine_bytes_max
        found = scan_root(self.disk, progress)
        self._other = found.other_bytes + sweep(self.disk, found)
        for path, error in found.bad:
            quarantine(self.disk, path, error.reason, str(error), limit)
        self._quarantined = trim_quarantine(self.disk, limit)
        orphans = self.index.load(found.blocks)
        self._doomed = [
            _Doomed(block_path(one.folder, one.chain_hash), one.bytes) for one in orphans
        ]
        before = self.index.total_bytes
        self._doom(self.index.victims(self.used_bytes - self.options.bytes_max))
        self._remove_files(self._doomed)
        _log.info(
            "spill root: %d blocks, %d of %d bytes; removed %d bytes over the budget, %d orphans, "
            "%d bad files",
            self.index.count,
            self.used_bytes,
            self.options.bytes_max,
            before - self.index.total_bytes,
            len(orphans),
            len(found.bad),
        )
        self._doomed = []

    def _doom(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            path = block_path(block.shelf.folder, block.chain_hash)
            self._doomed.append(_Doomed(path, block.bytes))
            self._figures.evicted_blocks += 1
            self._figures.evicted_bytes += block.bytes


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
