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
(I5) Of two writes of one block only the first is done: a removal that is queued for its name runs
     before it, never after.

Used on the event loop; what runs on a disk thread is passed to the caller's ``Worker``, the same
one for all houses of the root.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from millpond.runtime.config import parse_bytes
from millpond.runtime.errors import EngineError, SpillFailed
from millpond.runtime.kv.disk import Disk, PosixDisk
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
from millpond.runtime.kv.removals import Removals
from millpond.runtime.kv.scan import Progress, scan_root, sweep
from millpond.runtime.threads import Worker

_log = logging.getLogger(__name__)
PROBE_S, PROBE_S_MAX = 5.0, 300.0  # first and longest wait before spilling is tried again
PROBE_BYTES = 2**16
QUARANTINE_SHARE = 8  # at most this part of the budget lies in quarantine
ROOM_ROUNDS = 16  # turns to make room for one block, then it is refused
Refusal = Literal["off", "parent", "full"]
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """Bounds of a root.

    token                 names this writer among all processes, ``[0-9A-Za-z]+``; not reused
    bytes_max             budget for every byte under the root
    free_bytes_min        free space of the file system that is never taken
    quarantine_bytes_max  bytes that bad files may keep
    stall_s               a file operation longer than this turns spilling off; None: never
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
class _Write:
    """A write in progress; ``published`` is set on the disk thread."""

    draft: Draft
    published: bool = False


class SpillRoot:
    """Accountant, evictor and index of one root; made by ``open``."""

    def __init__(self, disk: Disk, options: RootOptions) -> None:
        self.disk, self.options = disk, options
        limit = min(options.quarantine_bytes_max, options.bytes_max // QUARANTINE_SHARE)
        self._quarantine_bytes_max = limit
        # mutable state, changed only on the event loop (and in open, before there is one)
        self.index = PrefixIndex()
        self.problem = ""
        self._removals = Removals(disk, limit)
        self._reserved = self._other = 0
        self._writing: set[str] = set()
        self._retry_at, self._retry_s = 0.0, PROBE_S
        self._evicted_blocks = self._evicted_bytes = self._quarantined_blocks = 0

    def __repr__(self) -> str:
        state = self.problem or f"{self.used_bytes / 2**30:.1f} GiB"
        return f"<SpillRoot {self.index.count} blocks, {state}>"

    @classmethod
    def open(cls, disk: Disk, options: RootOptions, progress: Progress | None = None) -> SpillRoot:
        """Claim a writer, sweep, scan and enforce the budget; blocks, on a disk thread.

        A root that can be read and not written opens with ``problem`` set.  Raises SpillFailed if
        it cannot be used at all.
        """
        root = cls(disk, options)
        try:
            disk.claim_writer(options.token)
            root._recover(progress)
        except OSError as error:
            raise SpillFailed("open", "the spill root", error) from error
        try:
            root._probe(root._probe_bytes())
        except OSError as error:
            root.turn_off(_reason(error), 0.0)
        return root

    @property
    def used_bytes(self) -> int:
        """Every byte that counts against the budget (I1)."""
        files = self.index.total_bytes + self._reserved + self._removals.bytes
        return files + self._removals.quarantine_bytes + self._other

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
            doomed_bytes=self._removals.bytes,
            quarantine_bytes=self._removals.quarantine_bytes,
            other_bytes=self._other,
            bytes_max=self.options.bytes_max,
            evicted_blocks=self._evicted_blocks,
            evicted_bytes=self._evicted_bytes,
            quarantined_blocks=self._quarantined_blocks,
            problem=self.problem,
        )

    # -- blocks

    async def store(self, worker: Worker, shelf: Shelf, draft: Draft, now: float) -> Refusal | None:
        """Publish a block; return None, or why it was not kept.

        The draft's buffers are read until this returns.  ``off``: spilling is off; ``parent``: the
        block before is not there; ``full``: no room within the budget.
        Raises EngineError if the disk thread is stuck; it may then still read the buffers.
        """
        if self.problem:
            return "off"
        path = draft.block.path
        if path in self._writing or draft.block.chain_hash in shelf.blocks:
            return None  # another house of the same model was faster (I5)
        self._writing.add(path)
        try:
            return await self._store_once(worker, shelf, draft, now)
        finally:
            self._writing.discard(path)

    async def _store_once(
        self, worker: Worker, shelf: Shelf, draft: Draft, now: float
    ) -> Refusal | None:
        parent = None
        if shelf.is_full and draft.block.first_token:
            parent = shelf.blocks.get(draft.block.parent)
            if parent is None:
                return "parent"
        pinned = (parent,) if parent is not None else ()
        self.index.pin(pinned)  # (I3)
        try:
            return await self._store(worker, shelf, draft)
        except (SpillFailed, OSError) as error:
            self.turn_off(_reason(error), now)
            return "off"
        except EngineError as error:
            self.turn_off(_reason(error), now)
            raise
        finally:
            self.index.unpin(pinned)

    async def forget(
        self, worker: Worker, block: Block, verdict: tuple[str, str] | None, now: float
    ) -> None:
        """Take a block whose file is bad or gone out of the index, with what follows it.

        verdict  reason and detail: the file moves to quarantine; None: it is gone already
        """
        for one in self.index.forget(block):
            if one is not block:
                self._evict((one,))
            elif verdict is not None:
                self._quarantined_blocks += 1
                self._removals.add(_path(one), one.bytes, verdict)
        try:
            await self._removals.run(worker, self.options.stall_s)
        except (OSError, EngineError) as error:
            self.turn_off(_reason(error), now)

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
        size = self._probe_bytes()
        self._reserved += size
        try:
            await worker.call(partial(self._probe, size), self.options.stall_s)
            await self._removals.run(worker, self.options.stall_s)
        except (OSError, EngineError) as error:
            self.turn_off(_reason(error), now)
            return
        finally:
            self._reserved -= size
        _log.info("spilling is on again")
        self.problem, self._retry_s = "", PROBE_S

    # -- inside

    async def _store(self, worker: Worker, shelf: Shelf, draft: Draft) -> Refusal | None:
        size = file_bytes(draft.block)
        if not await self._make_room(worker, size):
            return "full"
        try:
            await self._write(worker, shelf, draft)
        except SpillFailed as error:
            if error.errno not in _FULL:
                raise
            self._evict(self.index.victims(size))
            await self._removals.run(worker, self.options.stall_s)
            await self._write(worker, shelf, draft)
        return None if draft.block.chain_hash in shelf.blocks else "parent"

    async def _make_room(self, worker: Worker, size: int) -> bool:
        if self._removals:
            await self._removals.run(worker, self.options.stall_s)
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
            self._evict(victims)
            await self._removals.run(worker, self.options.stall_s)
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
        parent = block.parent if shelf.is_full and block.first_token else None
        if self.index.add(shelf, block.chain_hash, size, parent) is None:
            self._removals.add(block.path, size)  # its parent turned out to be bad meanwhile

    def _evict(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._removals.add(_path(block), block.bytes)
            self._evicted_blocks += 1
            self._evicted_bytes += block.bytes

    def _publish(self, write: _Write) -> None:
        """Disk thread."""
        prepare(self.disk, write.draft)
        publish(self.disk, write.draft)
        write.published = True

    def _probe_bytes(self) -> int:
        """What a probe may write without breaking the budget (I1)."""
        return max(0, min(PROBE_BYTES, self.options.bytes_max - self.used_bytes))

    def _probe(self, size: int) -> None:
        """Disk thread: write and remove a small file; raises OSError."""
        path = f"probe.{self.options.token}.0.tmp"
        try:
            self.disk.write(path, (bytes(size),), self.options.sync)
        finally:
            discard(self.disk, path)

    def _recover(self, progress: Progress | None) -> None:
        """Disk thread, at open."""
        limit = self._quarantine_bytes_max
        found = scan_root(self.disk, progress)
        self._other = found.other_bytes + sweep(self.disk, found)
        for path, error in found.bad:
            quarantine(self.disk, path, error.reason, str(error), limit)
        self._removals.quarantine_bytes = trim_quarantine(self.disk, limit)
        orphans = self.index.load(found.blocks)
        for one in orphans:
            self._removals.add(block_path(one.folder, one.chain_hash), one.bytes)
        before = self.index.total_bytes
        over = self.used_bytes - self._removals.bytes - self.options.bytes_max
        self._evict(self.index.victims(over))
        self._removals.run_now()
        _log.info(
            "spill root: %d blocks, %d of %d bytes; removed %d bytes over the budget, %d blocks "
            "without a parent, %d bad files",
            self.index.count,
            self.used_bytes,
            self.options.bytes_max,
            before - self.index.total_bytes,
            len(orphans),
            len(found.bad),
        )


def open_spill_root(
    path: Path, bytes_max: int | str, options: RootOptions, progress: Progress | None = None
) -> SpillRoot:
    """Open a folder of the real file system as a spill root; blocks, on a disk thread.

    bytes_max  budget, possibly a share of the file system; replaces the one of ``options``

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


def _path(block: Block) -> str:
    return block_path(block.shelf.folder, block.chain_hash)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
