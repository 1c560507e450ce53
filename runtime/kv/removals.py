"""Files that wait for their removal, or for their quarantine.

Invariants

(I1) A file counts as long as it is there: a removal that was cancelled or failed stays queued.
(I2) All removals of a root run on one disk thread, the one that writes: so a file that is queued
     is gone before the same name is written again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.files import quarantine
from millpond.runtime.threads import Worker

BATCH = 64  # files removed in one turn of the disk thread


@dataclass(slots=True)
class _Removal:
    """One file; ``verdict``: reason and detail of a bad one; ``gone`` is set on the disk thread."""

    path: str
    bytes: int
    verdict: tuple[str, str] | None
    gone: bool = False


class Removals:
    """Queued on the event loop, removed on the disk thread."""

    def __init__(self, disk: Disk, quarantine_bytes_max: int) -> None:
        self._disk, self._quarantine_bytes_max = disk, quarantine_bytes_max
        # mutable state; quarantine_bytes is changed on the disk thread only
        self._queue: list[_Removal] = []
        self.quarantine_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def bytes(self) -> int:
        """Bytes of the files that are still there."""
        return sum(one.bytes for one in self._queue if not one.gone)

    def add(self, path: str, size: int, verdict: tuple[str, str] | None = None) -> None:
        """Queue a file.

        verdict  reason and detail of a bad file, which moves to quarantine; None: remove it
        """
        self._queue.append(_Removal(path, size, verdict))

    async def run(self, worker: Worker, stall_s: float | None) -> None:
        """Remove what is queued, in bounded batches; raises OSError at the first that stays."""
        pending = list(self._queue)
        try:
            for start in range(0, len(pending), BATCH):
                batch = pending[start : start + BATCH]
                await worker.call(partial(self._remove, batch), stall_s)
        finally:
            self._queue = [one for one in self._queue if not one.gone]

    def run_now(self) -> None:
        """The same at once, on the disk thread, before there is an event loop."""
        self._remove(self._queue)
        self._queue = []

    def _remove(self, batch: list[_Removal]) -> None:
        """Disk thread."""
        for one in batch:
            if one.gone:
                continue
            if one.verdict is not None:
                reason, detail = one.verdict
                limit = self._quarantine_bytes_max
                self.quarantine_bytes = quarantine(self._disk, one.path, reason, detail, limit)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(one.path)
            one.gone = True
