"""The five file operations that all access to a spill root goes through, so tests can crash it.

``Disk`` is the port; ``PosixDisk`` the real one.  Every call blocks: call it on a disk thread.
Paths are relative to the root, with ``/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DiskEntry:
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
        """List a folder; raises FileNotFoundError if there is none."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from the offset on; return the bytes read, fewer only at the end."""

    def write(self, path: str, parts: Sequence[memoryview | bytes], sync: bool) -> None:
        """Create a new file that must not exist, with its folders, and write the parts.

        With ``sync`` the bytes are on the device when it returns.  On an error nothing is promised
        about the file; the caller removes it.
        """

    def rename(self, source: str, target: str, sync: bool) -> None:
        """Rename a file, replacing the target, folders made; with ``sync`` the folder is synced."""

    def remove(self, path: str) -> None:
        """Remove a file; raises FileNotFoundError if there is none."""

    def free_bytes(self) -> int:
        """Bytes that this process may still write to the file system."""

    def claim_writer(self, token: str) -> None:
        """Prove from now on that the writer named ``token`` lives, by a lock that dies with us."""

    def writer_lives(self, token: str) -> bool:
        """True iff some process holds that writer's lock."""
