"""What a store is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.kv.root import SpillRoot
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
