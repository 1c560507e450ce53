"""What lies under a spill root: block files by their headers, left-over temporaries, the rest.

Every function blocks: disk threads only.  Links are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from millpond.runtime.errors import BlockError
from millpond.runtime.kv.disk import WRITERS, Disk, DiskEntry
from millpond.runtime.kv.files import QUARANTINE, writer_of
from millpond.runtime.kv.header import PEEK_BYTES, SUFFIX, VERSION_FOLDER, Peek, peek
from millpond.runtime.kv.index import FoundBlock

Progress = Callable[[int], None]
DEPTH_MAX = 16  # folders below the root that are looked into
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_GROUP = re.compile(r"g[0-9]{1,4}-(?:full|sliding)-h[0-9]{1,9}-d[0-9]{1,9}-(?:f32|f16|bf16)")
_BLOCK = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_PREFIX = re.compile(r"[0-9a-f]{2}")


@dataclass(slots=True)
class RootScan:
    """What a scan found.

    blocks      block files whose header says what their name does
    bad         paths of files in a block's place that do not, and why
    temporaries paths of temporaries, the token of their writer, and their bytes
    other_bytes bytes of all other files but the quarantine's
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    bad: list[tuple[str, BlockError]] = field(default_factory=list)
    temporaries: list[tuple[str, str, int]] = field(default_factory=list)
    other_bytes: int = 0


def scan_root(disk: Disk, progress: Progress | None = None) -> RootScan:
    """Look at every file under the root; reads the start of each block file.

    progress  called with the count of block files looked at so far, now and then

    Raises OSError if a folder cannot be listed or a file cannot be read.
    """
    found = RootScan()
    for folder, entry in walk(disk):
        path = f"{folder}/{entry.name}" if folder else entry.name
        writer = writer_of(entry.name)
        if writer is not None:
            found.temporaries.append((path, writer, entry.bytes))
        elif _is_block_path(path):
            _look(disk, folder, entry, found)
            if progress is not None and not len(found.blocks) % 256:
                progress(len(found.blocks))
        elif folder != QUARANTINE:
            found.other_bytes += entry.bytes
    return found


def walk(disk: Disk) -> Iterator[tuple[str, DiskEntry]]:
    """Iterate over (folder, entry) of every file under the root, in a fixed order."""
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = sorted(disk.scan(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            if not folder:
                raise
            continue  # gone since it was listed
        for entry in entries:
            if not entry.is_folder:
                yield folder, entry
            elif folder.count("/") < DEPTH_MAX:
                stack.append(f"{folder}/{entry.name}" if folder else entry.name)


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


def _is_block_path(path: str) -> bool:
    fields = path.split("/")
    if len(fields) != 5 or fields[0] != VERSION_FOLDER:
        return False
    shapes = (_NAMESPACE, _GROUP, _PREFIX, _BLOCK)
    return all(
        shape.fullmatch(part) for shape, part in zip(shapes, fields[1:], strict=True)
    ) and fields[4].startswith(fields[3])


def _look(disk: Disk, folder: str, entry: DiskEntry, found: RootScan) -> None:
    path = f"{folder}/{entry.name}"
    start = memoryview(bytearray(PEEK_BYTES))
    try:
        count = disk.read_into(path, 0, start)
    except FileNotFoundError:
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
