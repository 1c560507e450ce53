"""The file operations that all access to a spill root goes through, so that tests can crash it.

``Disk`` is the port; ``PosixDisk`` the real one.  Every call blocks: call it on a disk thread.
Paths are relative to the root, with ``/``.

Invariants of ``PosixDisk``

(I1) Every path is opened below a descriptor of the root folder, so a root that is renamed or
     replaced while it is in use is never mixed with the one that took its place.
(I2) Folders are made 0700 and files 0600; a symbolic link is never followed below the root.
(I3) A writer lives exactly while its file under ``writers/`` is locked; the lock dies with the
     process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

WRITERS = "writers"
LOCK = "lock"
JOURNAL = "journal"
NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP, errno.ESPIPE)  # a link, socket, pipe
_IOV_MAX = 512  # buffers of one system call; Linux and macOS take 1024


class DiskEntry(NamedTuple):
    """One file or folder of a listing.

    name      last part of its path
    bytes     length of a file, 0 for a folder
    mtime_ns  time of its last write
    """

    name: str
    bytes: int
    mtime_ns: int
    is_folder: bool


class Disk(Protocol):
    """Blocking file operations under one root; each raises OSError as the system does."""

    def scan(self, folder: str) -> list[DiskEntry]:
        """List a folder, ``""`` being the root; raises FileNotFoundError if there is none."""

    def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
        """Fill the buffers, one after another, from the offset on; return the bytes read.

        Fewer than asked for means the end of the file.
        """

    def write(self, path: str, parts: Sequence[memoryview | bytes], sync: bool) -> None:
        """Create a new file that must not exist, with its folders, and write the parts.

        With ``sync`` the bytes are on the device when it returns.  On an error nothing is promised
        about the file; the caller removes it.
        """

    def append(self, path: str, offset: int, data: bytes, sync: bool) -> None:
        """Write at the offset and end the file there; the file is made if there is none."""

    def rename(self, source: str, target: str, sync: bool) -> None:
        """Rename a file, replacing the target, folders made; with ``sync`` the folder is synced."""

    def remove(self, path: str) -> None:
        """Remove a file; raises FileNotFoundError if there is none."""

    def free_bytes(self) -> int:
        """Bytes that this process may still write to the file system."""

    def total_bytes(self) -> int:
        """Size of the file system."""

    def lock(self) -> AbstractContextManager[None]:
        """Hold the root's lock; whoever else wants it waits, in this process or another."""

    def claim_writer(self, token: str) -> None:
        """Prove from now on that the writer named ``token`` lives, by a lock that dies with us."""

    def writer_lives(self, token: str) -> bool:
        """True iff some process holds that writer's lock."""

    def is_attached(self) -> bool:
        """True while the root's path still leads to the folder that was opened."""

    def reattach(self) -> None:
        """Open what stands at the root's path now; writers claimed so far are given up."""

    def close(self) -> None:
        """Let go of the root and of every writer claimed here."""


class PosixDisk:
    """A folder of the real file system; any thread may call it."""

    def __init__(self, root: Path) -> None:
        """Open the folder, made with its parents if there is none; raises OSError."""
        self.root = root
        self._fd = _open_root(root)
        # mutable state, changed only in claim_writer and close
        self._writers: dict[str, int] = {}
        self._in_process = threading.Lock()

    def __repr__(self) -> str:
        return f"<PosixDisk {self.root}>"

    def close(self) -> None:
        """Let go of the root and of every claimed writer; closing again does nothing."""
        self._release_writers()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def total_bytes(self) -> int:
        """See ``Disk.total_bytes``."""
        found = os.fstatvfs(self._fd)
        return found.f_blocks * found.f_frsize

    def scan(self, folder: str) -> list[DiskEntry]:
        """See ``Disk.scan``."""
        fd = self._open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        found: list[DiskEntry] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                        found.append(_entry(entry))
        finally:
            os.close(fd)
        return found

    def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
        """See ``Disk.read_into``."""
        fd = self._open(path, os.O_RDONLY)
        try:
            done = 0
            pending = [buffer for buffer in buffers if len(buffer)]
            while pending:
                count = os.preadv(fd, pending[:_IOV_MAX], offset + done)
                if not count:
                    break
                done += count
                pending = _behind(pending, count)
            return done
        finally:
            os.close(fd)

    def write(self, path: str, parts: Sequence[memoryview | bytes], sync: bool) -> None:
        """See ``Disk.write``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = self._open(path, flags)
        except FileNotFoundError:
            self._make_folders(path, sync)
            fd = self._open(path, flags)
        try:
            pending = [memoryview(part) for part in parts if len(part)]
            while pending:
                pending = _behind(pending, os.writev(fd, pending[:_IOV_MAX]))
            if sync:
                _sync(fd)
        finally:
            os.close(fd)

    def append(self, path: str, offset: int, data: bytes, sync: bool) -> None:
        """See ``Disk.append``."""
        fd = self._open(path, os.O_WRONLY | os.O_CREAT)
        try:
            pending = [memoryview(data)] if data else []
            done = 0
            while pending:
                count = os.pwritev(fd, pending, offset + done)
                done += count
                pending = _behind(pending, count)
            os.ftruncate(fd, offset + len(data))
            if sync:
                _sync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str, sync: bool) -> None:
        """See ``Disk.rename``."""
        try:
            os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileNotFoundError:
            self._make_folders(target, sync)
            os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        if sync:
            self._sync_folder(target)

    def remove(self, path: str) -> None:
        """See ``Disk.remove``."""
        os.unlink(path, dir_fd=self._fd)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder; raises OSError as the system does."""
        os.rmdir(path, dir_fd=self._fd)

    def free_bytes(self) -> int:
        """See ``Disk.free_bytes``."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def is_attached(self) -> bool:
        """True while the root's path still leads to the folder that was opened."""
        try:
            here, there = os.fstat(self._fd), os.stat(self.root)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def reattach(self) -> None:
        """See ``Disk.reattach``."""
        fd = _open_root(self.root)
        self._release_writers()
        os.dup2(fd, self._fd, inheritable=False)  # at once: other threads use that number
        os.close(fd)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See ``Disk.lock``."""
        with self._in_process:
            fd = self._open(LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    def claim_writer(self, token: str) -> None:
        """See ``Disk.claim_writer``."""
        path = f"{WRITERS}/{token}"
        while token not in self._writers:
            try:
                fd = self._open(path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                self._make_folders(path, False)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._leads_to(path, fd):
                    self._writers[token] = fd
                    return
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was swept between open and lock: once more

    def writer_lives(self, token: str) -> bool:
        """See ``Disk.writer_lives``; the file of a writer that is gone is removed."""
        path = f"{WRITERS}/{token}"
        try:
            fd = self._open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._leads_to(path, fd):
                self.remove(path)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        # nonblocking: a pipe in a file's place must not wait for its other end
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(path, flags, 0o600, dir_fd=self._fd)

    def _release_writers(self) -> None:
        while self._writers:
            token, fd = self._writers.popitem()
            with contextlib.suppress(OSError):
                self.remove(f"{WRITERS}/{token}")
            os.close(fd)

    def _leads_to(self, path: str, fd: int) -> bool:
        here = os.fstat(fd)
        try:
            there = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _make_folders(self, path: str, sync: bool) -> None:
        folders = path.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            folder = "/".join(folders[:depth])
            try:
                os.mkdir(folder, 0o700, dir_fd=self._fd)
            except FileExistsError:
                continue
            if sync:
                self._sync_folder(folder)

    def _sync_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0] or "."
        fd = self._open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sync(fd)
        finally:
            os.close(fd)


def _open_root(root: Path) -> int:
    """Open a root, made if there is none; a new or empty one becomes private."""
    is_new = not root.exists()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if is_new or not os.listdir(fd):
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o700)
    return fd


def _entry(entry: os.DirEntry[str]) -> DiskEntry:
    found = entry.stat(follow_symlinks=False)
    is_folder = stat.S_ISDIR(found.st_mode)
    return DiskEntry(entry.name, 0 if is_folder else found.st_size, found.st_mtime_ns, is_folder)


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the buffers after their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _sync(fd: int) -> None:
    """Put a file or folder on the device; macOS needs its own call for that."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a folder of a file system that syncs none
            raise
