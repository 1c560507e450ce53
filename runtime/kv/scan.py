"""What lies under a spill root: block files by their headers, left-over temporaries, the rest.

Every function blocks: disk threads only.  Links are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from millpond.runtime.errors import BlockError
from millpond.runtime.kv.disk import JOURNAL, LOCK, NO_FILE, WRITERS, Disk, DiskEntry
from millpond.runtime.kv.files import QUARANTINE, writer_of
from millpond.runtime.kv.header import GROUP_NAME, PEEK_BYTES, SUFFIX, VERSION_FOLDER, Peek, peek
from millpond.runtime.kv.index import FoundBlock, PrefixIndex

Progress = Callable[[int], None]
DEPTH_MAX = 16  # folders below the root that are looked into
PROGRESS_BLOCKS = 256
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_BLOCK = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_PREFIX = re.compile(r"[0-9a-f]{2}")


@dataclass(slots=True)
class RootScan:
    """What a scan found.

    blocks      block files, not known before, whose header says what their name does
    seen        chain hashes of the known ones that are there, by folder
    bad         paths of files in a block's place that do not, and why
    temporaries paths of temporaries, the token of their writer, and their bytes
    other_bytes bytes of all other files but those of quarantine, journal and lock
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    seen: dict[str, set[bytes]] = field(default_factory=dict)
    bad: list[tuple[str, BlockError]] = field(default_factory=list)
    temporaries: list[tuple[str, str, int]] = field(default_factory=list)
    other_bytes: int = 0


def scan_root(
    disk: Disk, progress: Progress | None = None, known: PrefixIndex | None = None
) -> RootScan:
    """Look at every file under the root; reads the start of each block file that is not known.

    progress  called with the count of headers read so far, now and then
    known     blocks with their sizes; one that is there with that size is not read

    Raises OSError if a folder cannot be listed or a file cannot be read.
    """
    found = RootScan()
    shelves = known.shelves if known is not None else {}
    for folder, entries in walk(disk):
        group = folder.rpartition("/")[0]
        shelf = shelves.get(group)
        in_place = _is_block_folder(folder)
        for entry in entries:
            if not in_place or not _BLOCK.fullmatch(entry.name) or entry.name[:2] != folder[-2:]:
                _note(folder, entry, found)
                continue
            name = bytes.fromhex(entry.name[:64])
            block = shelf.blocks.get(name) if shelf is not None else None
            if block is not None and block.bytes == entry.bytes:
                found.seen.setdefault(group, set()).add(name)
                continue
            _look(disk, folder, entry, found)
            if progress is not None and not len(found.blocks) % PROGRESS_BLOCKS:
                progress(len(found.blocks))
    return found


def walk(disk: Disk) -> Iterator[tuple[str, list[DiskEntry]]]:
    """Iterate over (folder, its files) below the root, in a fixed order."""
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = disk.scan(folder)
        except FileNotFoundError:
            if not folder:
                raise
            continue  # gone since it was listed
        entries.sort(key=lambda entry: entry.name)
        yield folder, [entry for entry in entries if not entry.is_folder]
        if folder.count("/") < DEPTH_MAX:
            below = [entry.name for entry in entries if entry.is_folder]
            stack.extend(f"{folder}/{name}" if folder else name for name in below)


def sweep(disk: Disk, found: RootScan) -> int:
    """Remove the temporaries whose writer is gone; return the bytes of those that stay.

    Files of writers that are gone are removed too.
    """
    lives: dict[str, bool] = {}
    kept = 0
    for path, token, size in found.temporaries:
        if token not in lives:
            lives[token] = bool(token) and disk.writer_lives(token)
        if lives[token]:
            kept += size
            continue
        try:
            disk.remove(path)
        except FileNotFoundError:
            continue
    try:
        writers = [entry.name for entry in disk.scan(WRITERS)]
    except FileNotFoundError:
        return kept
    for token in writers:
        if token not in lives:
            disk.writer_lives(token)
    return kept


def _note(folder: str, entry: DiskEntry, found: RootScan) -> None:
    """Sort a file that is no block."""
    writer = writer_of(entry.name)
    if writer is not None:
        path = f"{folder}/{entry.name}" if folder else entry.name
        found.temporaries.append((path, writer, entry.bytes))
    elif folder != QUARANTINE and (folder or entry.name not in (JOURNAL, LOCK)):
        found.other_bytes += entry.bytes


def _is_block_folder(folder: str) -> bool:
    fields = folder.split("/")
    if len(fields) != 4 or fields[0] != VERSION_FOLDER:
        return False
    shapes = (_NAMESPACE, GROUP_NAME, _PREFIX)
    return all(shape.fullmatch(part) for shape, part in zip(shapes, fields[1:], strict=True))


def _look(disk: Disk, folder: str, entry: DiskEntry, found: RootScan) -> None:
    path = f"{folder}/{entry.name}"
    start = memoryview(bytearray(PEEK_BYTES))
    try:
        count = disk.read_into(path, 0, start)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        found.bad.append((path, BlockError("header: found a link, a pipe or a socket")))
        return
    try:
        head = peek(bytes(start[:count]))
        _check_place(head, path)
    except BlockError as error:
        found.bad.append((path, error))
        return
    found.blocks.append(
        FoundBlock(
            folder=folder.rpartition("/")[0],
            chain_hash=head.chain_hash,
            parent=head.parent,
            first_token=head.first_token,
            bytes=entry.bytes,
            mtime_ns=entry.mtime_ns,
        )
    )


def _check_place(head: Peek, path: str) -> None:
    _, namespace, group, _, name = path.split("/")
    if head.chain_hash.hex() != name.removesuffix(SUFFIX):
        raise BlockError("header: found another chain hash than in the name", reason="mismatch")
    if head.group != group:
        raise BlockError("header: found another group than the folder's", reason="mismatch")
    if head.fingerprint.hex()[:16] != namespace:
        raise BlockError("header: found another fingerprint than the folder's", reason="mismatch")
