"""``SimDevice``: the storage under simulated disks, and what a crash leaves of it.

It outlives the processes that use it; ``runtime.testing.sim_disk`` is one process's view.

Invariants

(I1) ``used_bytes`` is the sum over the files that have a name.
(I2) After a crash of a process every finished operation stands; the one in flight may be half done.
(I3) After a loss of power, what was synced stands; each write and each change of a name that was
     not synced is kept, lost, torn or turned into garbage, one by one, as the seed says.

Not synced is: the bytes of a file written without ``sync``, and any change of names in a folder
since the last operation with ``sync`` in it.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from dataclasses import dataclass

from millpond.runtime.kv.disk import DiskEntry


class File:
    """Bytes with or without a name; ``durable`` are those that a loss of power leaves."""

    __slots__ = ("content", "durable", "mtime_ns", "uncertain")

    def __init__(self, content: bytes, mtime_ns: int) -> None:
        self.content = bytearray(content)
        self.durable = b""
        self.uncertain = True  # written since the last sync
        self.mtime_ns = mtime_ns

    def sync(self) -> None:
        """What is written is on the device from now on."""
        self.durable, self.uncertain = bytes(self.content), False


@dataclass(frozen=True, slots=True)
class NameChange:
    """One change of a folder that is not synced yet: ``path`` leads to ``file``, or to nothing."""

    path: str
    file: File | None


class SimDevice:
    """Files and folders in memory; not safe for threads.

    capacity_bytes  size of the file system; None: without end
    """

    def __init__(self, seed: int, capacity_bytes: int | None = None) -> None:
        self.random = random.Random(seed)
        self.capacity_bytes = capacity_bytes
        self.losses: Counter[str] = Counter()  # what crashes and rot did, by kind
        # mutable state, changed only in the methods below
        self.files: dict[str, File] = {}
        self.folders: dict[str, None] = {"": None}
        self.used_bytes = self.power_losses = 0
        self.writers: dict[str, object] = {}  # token → the process that lives
        self._durable: dict[str, File] = {}
        self._changes: list[NameChange] = []
        self._now_ns = 10**18

    def __repr__(self) -> str:
        return f"<SimDevice {len(self.files)} files, {self.used_bytes} bytes>"

    def listing(self, folder: str) -> list[DiskEntry]:
        """Return the entries of a folder, in no order that anyone may rely on."""
        if folder not in self.folders:
            raise _error(errno.ENOENT, folder)
        start = f"{folder}/" if folder else ""
        found = [
            DiskEntry(path[len(start) :], len(file.content), file.mtime_ns, False)
            for path, file in self.files.items()
            if path.startswith(start) and "/" not in path[len(start) :]
        ]
        found += [
            DiskEntry(path[len(start) :], 0, 0, True)
            for path in self.folders
            if path and path.startswith(start) and "/" not in path[len(start) :]
        ]
        self.random.shuffle(found)
        return found

    def file(self, path: str) -> File:
        """Return the file at a path; raises FileNotFoundError."""
        found = self.files.get(path)
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def free_bytes(self) -> int:
        """Bytes that still fit."""
        if self.capacity_bytes is None:
            return 2**50
        return max(0, self.capacity_bytes - self.used_bytes)

    def create(self, path: str, content: bytes) -> File:
        """Make a file that must not exist, with its folders."""
        if path in self.files or path in self.folders:
            raise _error(errno.EEXIST, path)
        self._make_folders(path)
        file = File(content, self._tick())
        self._name(path, file)
        return file

    def overwrite(self, file: File, offset: int, data: bytes) -> None:
        """Write at an offset of a named file and end it there."""
        before = len(file.content)
        content = bytes(file.content[:offset]).ljust(offset, b"\0") + data
        file.content, file.uncertain, file.mtime_ns = bytearray(content), True, self._tick()
        self.used_bytes += len(content) - before

    def rename(self, source: str, target: str) -> None:
        """Give a file another name; what had that name before is gone."""
        file = self.file(source)
        if target in self.folders:
            raise _error(errno.EISDIR, target)
        self._make_folders(target)
        if source != target:
            self._name(target, file)
            self._name(source, None)

    def remove(self, path: str) -> None:
        """Take a file's name away."""
        self.file(path)
        self._name(path, None)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        if path not in self.folders:
            raise _error(errno.ENOENT, path)
        if any(name.startswith(f"{path}/") for name in (*self.files, *self.folders)):
            raise _error(errno.ENOTEMPTY, path)
        del self.folders[path]

    def sync_folder(self, path: str) -> None:
        """Every change of a name in the folder of ``path`` stands from now on."""
        folder = path.rpartition("/")[0]
        kept = []
        for change in self._changes:
            if change.path.rpartition("/")[0] == folder:
                self._settle(change)
            else:
                kept.append(change)
        self._changes = kept

    def flip(self, path: str) -> None:
        """Rot: one bit of a file at rest changes, on the device as well; often near its end.

        Payloads of simulated worlds are a small part of their files, and lie there.
        """
        file = self.file(path)
        if not file.content:
            return
        bits = 8 * len(file.content)
        place = self.random.randrange(bits - bits // 16 if self.random.random() < 0.6 else 0, bits)
        file.content[place // 8] ^= 1 << place % 8
        file.durable = bytes(file.content) if not file.uncertain else file.durable
        self.losses["rot"] += 1

    def vanish(self, path: str) -> None:
        """Somebody else removes a file for good."""
        self.remove(path)
        self._durable.pop(path, None)
        self._changes = [change for change in self._changes if change.path != path]
        self.losses["vanish"] += 1

    def lose_power(self) -> None:
        """Become what the device holds after a loss of power (I3); every process is dead."""
        self.power_losses += 1
        self.writers.clear()
        for change in self._changes:
            if self.random.random() < 0.5:
                self._settle(change)
            else:
                self.losses["name lost"] += 1
        self._changes.clear()
        self.files = dict(self._durable)
        for file in {id(file): file for file in self.files.values()}.values():
            if file.uncertain:
                self._lose_bytes(file)
        self.used_bytes = sum(len(file.content) for file in self.files.values())

    def _lose_bytes(self, file: File) -> None:
        kind = self.random.choice(("kept", "lost", "torn", "garbage"))
        content = bytes(file.content)
        safe = len(file.durable) if content.startswith(file.durable) else 0
        if kind == "lost":
            content = file.durable
        elif kind == "torn":
            content = content[: self.random.randrange(safe, len(content) + 1)]
        elif kind == "garbage" and safe < len(content):
            start = self.random.randrange(safe, len(content))
            end = min(len(content), start + self.random.choice((1, 16, 64, 512)))
            content = content[:start] + self.random.randbytes(end - start) + content[end:]
        if kind != "kept":
            self.losses[f"bytes {kind}"] += 1
        file.content = bytearray(content)
        file.sync()

    def _name(self, path: str, file: File | None) -> None:
        before = self.files.pop(path, None)
        if before is not None:
            self.used_bytes -= len(before.content)
        if file is not None:
            self.files[path] = file
            self.used_bytes += len(file.content)
        self._changes.append(NameChange(path, file))

    def _settle(self, change: NameChange) -> None:
        if change.file is None:
            self._durable.pop(change.path, None)
        else:
            self._durable[change.path] = change.file

    def _make_folders(self, path: str) -> None:
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            if folder in self.files:
                raise _error(errno.ENOTDIR, folder)
            self.folders.setdefault(folder)

    def _tick(self) -> int:
        self._now_ns += 1000
        return self._now_ns


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
