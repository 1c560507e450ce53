"""What operators do with a spill root: list, verify, collect, clear.  Needs no model.

Every function blocks, and works beside processes that use the root.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.books import path_of
from millpond.runtime.kv.disk import JOURNAL, LOCK, WRITERS, Disk, PosixDisk
from millpond.runtime.kv.files import QUARANTINE, file_bytes, read_block, writer_of
from millpond.runtime.kv.header import (
    HEADER_BYTES_MAX,
    VERSION_FOLDER,
    BlockIdentity,
    read_identity,
)
from millpond.runtime.kv.index import Block, Shelf
from millpond.runtime.kv.journal import Journal
from millpond.runtime.kv.keys import Seal
from millpond.runtime.kv.root import RootOptions, SpillRoot, open_spill_root
from millpond.runtime.kv.scan import walk
from millpond.runtime.kv.sealing import is_closed, is_sealed, read_sealed_identity

UNBOUNDED = 2**62  # a budget that evicts nothing
TOKEN_BYTES = 16
Step = Callable[[int, int], None]
_OURS = re.compile(rf"v[0-9]+|{QUARANTINE}|{WRITERS}")


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """The blocks of one group that begin with the same block.

    first_block  chain hash of that block, hex
    blocks, bytes, depth  of the tree: files, their whole sizes, blocks of its longest chain
    tips         chain hashes where chains end, hex
    is_used      a request has read it since it was written
    """

    first_block: str
    blocks: int
    bytes: int
    depth: int
    tips: tuple[str, ...]
    is_used: bool


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of one namespace; ``prefixes`` is empty for a sliding group."""

    namespace: str
    group: str
    blocks: int
    bytes: int
    prefixes: tuple[PrefixSummary, ...]


@dataclass(slots=True)
class VerifyReport:
    """What a check of every block found.

    blocks, bytes  whole ones
    bad            path, reason and detail of those that were set aside
    unopened       sealed ones, without a key or with another than theirs; they stay
    """

    blocks: int = 0
    bytes: int = 0
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    unopened: int = 0


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection left and removed."""

    blocks: int
    bytes: int
    removed_blocks: int
    removed_bytes: int


@dataclass(slots=True)
class ClearReport:
    """What was removed, and what was left because it is not ours or is in use."""

    files: int = 0
    bytes: int = 0
    left: list[str] = field(default_factory=list)


def open_for_care(path: Path, bytes_max: int = UNBOUNDED) -> SpillRoot:
    """Open a root as one more process.  Raises SpillFailed if there is none."""
    if not path.is_dir():
        found = NotADirectoryError(20, "Not a folder") if path.exists() else None
        error = found or FileNotFoundError(2, "No such folder")
        raise SpillFailed("open", str(path), error)
    options = RootOptions(
        token=secrets.token_hex(TOKEN_BYTES), bytes_max=bytes_max, quarantine_bytes_max=2**28
    )
    return open_spill_root(path, bytes_max, options)


def summarise(root: SpillRoot) -> list[GroupSummary]:
    """Return what an open root holds, by namespace and group."""
    with root.guard:
        return [
            _group_summary(root, folder, shelf)
            for folder, shelf in sorted(root.index.shelves.items())
            if shelf.blocks
        ]


def verify(root: SpillRoot, step: Step | None = None, key: Seal | None = None) -> VerifyReport:
    """Read every block and set aside what is not whole, with what follows it.

    key   of sealed blocks; those of another key cannot be told from damaged ones, and stay
    step  called with the count of blocks checked and of all
    """
    with root.guard:
        blocks = [block for block, _ in root.index.snapshot()]
    report = VerifyReport()
    for number, block in enumerate(blocks):
        if block.ring is not None:  # it may have followed one that was set aside
            try:
                if is_closed(root.disk, path_of(block), key):
                    report.unopened += 1
                else:
                    verify_file(root.disk, path_of(block), key)
                    report.blocks += 1
                    report.bytes += block.bytes
            except FileNotFoundError:
                root.forget(block, None, 0.0)
            except (BlockError, OSError) as error:
                reason = error.reason if isinstance(error, BlockError) else "io_error"
                report.bad.append((path_of(block), reason, str(error)))
                root.forget(block, (reason, str(error)), 0.0)
        if step is not None:
            step(number + 1, len(blocks))
    if root.problem:
        raise SpillFailed("set aside", "a bad block", OSError(5, root.problem))
    return report


def verify_file(disk: Disk, path: str, key: Seal | None = None) -> BlockIdentity:
    """Check that a file is a whole block, in its place; return what it is.

    Raises BlockError, FileNotFoundError or OSError.
    """
    if key is not None and is_sealed(disk, path):
        block = read_sealed_identity(disk, path, key)
    else:
        block = read_header(disk, path)
    if block.path != path:
        raise BlockError("header: found another block than the name says", reason="mismatch")
    last = memoryview(bytearray(2))
    if disk.read_into(path, file_bytes(block) - 1, last) != 1:  # before memory is taken for it
        raise BlockError("payload: found another length than the header's")
    read_block(disk, block, memoryview(bytearray(block.payload_bytes)))
    return block


def read_header(disk: Disk, path: str) -> BlockIdentity:
    """Return what a plain block file's header says; raises as ``verify_file``."""
    if is_sealed(disk, path):
        raise BlockError("header: found an encrypted block, which cannot leave its root")
    length = memoryview(bytearray(8))
    count = disk.read_into(path, 0, length)
    size = int.from_bytes(length, "little")
    if count < 8 or size > HEADER_BYTES_MAX:
        raise BlockError("header: found no length of a header")
    header = memoryview(bytearray(8 + size))
    if disk.read_into(path, 0, header) < len(header):
        raise BlockError("header: the file ends within it")
    return read_identity(bytes(header))[0]


def collect(path: Path, bytes_max: int) -> CollectReport:
    """Evict down to a budget, sweep what dead writers left.  Raises SpillFailed."""
    root = open_for_care(path, bytes_max)
    try:
        figures = root.statistics()
        return CollectReport(
            figures.blocks, figures.block_bytes, figures.evicted_blocks, figures.evicted_bytes
        )
    finally:
        root.close()


def clear(path: Path, namespace: str | None = None) -> ClearReport:
    """Remove every byte of a root, or every block of one namespace (16 hex digits).

    Files that millpond did not make stay, and so do the locks of living writers; the report names
    them.  Raises SpillFailed.
    """
    try:
        if namespace is not None:
            return _clear_namespace(path, namespace)
        disk = PosixDisk(path) if path.is_dir() else None
        if disk is None:
            return ClearReport()
        try:
            with disk.lock():
                return _clear_all(disk)
        finally:
            disk.close()
    except OSError as error:
        raise SpillFailed("clear", str(path), error) from error


def _clear_all(disk: PosixDisk) -> ClearReport:
    report, folders = ClearReport(), []
    for folder, entries in walk(disk):
        folders.append(folder)
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if not _is_ours(folder, entry.name):
                report.left.append(path)
            elif folder == WRITERS:
                if disk.writer_lives(entry.name):
                    report.left.append(path)
            elif path != LOCK:  # others may wait for it; it has no bytes
                with contextlib.suppress(FileNotFoundError):
                    disk.remove(path)
                    report.files += 1
                    report.bytes += entry.bytes
    if any(path.startswith(f"{WRITERS}/") for path in report.left):
        Journal(disk, secrets.token_hex(TOKEN_BYTES)).replace(())  # so that they learn of it
    for folder in sorted(folders, key=len, reverse=True):
        if folder:
            with contextlib.suppress(OSError):  # not empty: something was left in it
                disk.remove_folder(folder)
    if not report.left:
        disk.remove(LOCK)
    return report


def _is_ours(folder: str, name: str) -> bool:
    if folder:
        return _OURS.fullmatch(folder.partition("/")[0]) is not None
    return name in (LOCK, JOURNAL) or writer_of(name) is not None


def _clear_namespace(path: Path, namespace: str) -> ClearReport:
    report = ClearReport()
    root = open_for_care(path)
    try:
        for folder, shelf in tuple(root.index.shelves.items()):
            if folder.split("/")[:2] != [VERSION_FOLDER, namespace]:
                continue
            for block in tuple(shelf.blocks.values()):
                if block.ring is not None:
                    removed, size = root.remove(block)
                    report.files += removed
                    report.bytes += size
    finally:
        root.close()
    return report


def _group_summary(root: SpillRoot, folder: str, shelf: Shelf) -> GroupSummary:
    _, namespace, group = folder.split("/")
    firsts = [block for block in shelf.blocks.values() if block.parent is None]
    size = sum(block.bytes for block in shelf.blocks.values())
    prefixes = [_prefix_summary(root, first) for first in firsts] if shelf.is_full else []
    prefixes.sort(key=lambda one: (-one.bytes, one.first_block))
    return GroupSummary(namespace, group, len(shelf.blocks), size, tuple(prefixes))


def _prefix_summary(root: SpillRoot, first: Block) -> PrefixSummary:
    level, depth, blocks = [first], 0, [first]
    while level:
        depth += 1
        level = [child for block in level for child in block.each_child()]
        blocks.extend(level)
    tips = tuple(block.chain_hash.hex() for block in blocks if block.children is None)
    size, is_used = sum(block.bytes for block in blocks), first.ring is root.index.kept
    return PrefixSummary(first.chain_hash.hex(), len(blocks), size, depth, tips, is_used)
