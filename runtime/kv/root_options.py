"""Bounds and figures of a spill root."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millpond.runtime.kv.keys import Seal
from millpond.runtime.kv.namespaces import NamespaceFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """Bounds of a root.

    token                 names this writer among all processes, ``[0-9A-Za-z]+``; not reused
    bytes_max             budget for every byte under the root
    free_bytes_min        free space of the file system that is never taken
    quarantine_bytes_max  bytes that bad files may keep
    stall_s               a file operation longer than this turns spilling off; None: never
    sync                  durability ``power``
    seal                  key of the files that are written; None: they are plain
    now                   seconds since 1970, by which pins end
    """

    token: str
    bytes_max: int
    free_bytes_min: int = 0
    quarantine_bytes_max: int = 0
    stall_s: float | None = None
    sync: bool = False
    seal: Seal | None = None
    now: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class RootStatistics:
    """Figures of a root.

    blocks, block_bytes  block files
    reserved_bytes       of blocks that writers are about to write, here and in other processes
    doomed_bytes         of files that could not be removed yet
    quarantine_bytes     of bad files set aside
    other_bytes          of the journal, and of files that are not ours to remove
    bytes_max            budget for all of them
    evicted_blocks, evicted_bytes, quarantined_blocks  by this process, ever
    problem              why nothing is spilled; empty while spilling works
    namespaces           blocks and bytes by model
    pinned_bytes         of blocks that callers pinned for a time
    """

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
    namespaces: tuple[NamespaceFigures, ...] = ()
    pinned_bytes: int = 0
