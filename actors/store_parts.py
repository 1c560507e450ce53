"""What a store is made of, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.codecs.messages import MissReason
from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.kv.memory import MemoryStatistics
from millpond.runtime.kv.root import RootStatistics, SpillRoot
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreParts:
    """What a store is made of.

    layout              groups and grid
    fingerprint, guard  32 bytes each, of the model
    limits              bounds
    root                where blocks are; None: nothing is spilled or restored
    readers             disk threads that read, at least one
    writer              the disk thread that writes and removes; one for all houses of a root
    restore_pool        slots for what is read; each holds at least one plane
    spill_pool          slots that offers come in
    clock               monotonic seconds
    context_tokens      tokens that prompt and completion may reach
    kv_bytes_max        budget of the live caches, None: no bound
    """

    layout: KvLayout
    fingerprint: bytes
    guard: bytes
    limits: Limits
    root: SpillRoot | None
    readers: tuple[Worker, ...]
    writer: Worker
    restore_pool: StagingPool
    spill_pool: StagingPool
    clock: Callable[[], float]
    context_tokens: int = 2**31
    kv_bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures of one store.

    restoring, waiting            requests whose blocks are read, and all others here
    spilled_blocks, spilled_bytes files written, and their whole sizes
    duplicates                    offers of blocks that were there
    refused, refusals             offers that were not kept, in all and by reason
    restored_blocks, restored_bytes  files read for admitted requests, and their whole sizes
    misses                        by reason
    problem                       why nothing is spilled now; empty if all is well
    root                          figures of the root, None if there is none
    memory                        of the live caches
    pins, pins_refused            prompts that were pinned, or not though they should be
    pin_problem                   why the last one was not; empty if it was
    """

    restoring: int
    waiting: int
    spilled_blocks: int
    spilled_bytes: int
    duplicates: int
    refused: int
    refusals: dict[str, int]
    restored_blocks: int
    restored_bytes: int
    misses: dict[MissReason, int]
    problem: str
    root: RootStatistics | None
    memory: MemoryStatistics
    pins: int = 0
    pins_refused: int = 0
    pin_problem: str = ""
