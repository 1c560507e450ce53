"""The store: owns the prefix index's use and the spill files of one house.

Invariants

(I1) Of each request the engine gets its Restores, then its Admit, then possibly Cancel; or, if the
     cancellation came first, possibly Restores, then Cancel(before_admit) and nothing after it.
(I2) Restores of at most ``restores_max`` requests are under way, in the order of the submissions.
(I3) Offers never wait for restores nor restores for offers: each arrow has its loop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from anyio import CancelScope, Event, create_task_group, move_on_after
from millpond.actors.store_parts import StoreParts
from millpond.actors.store_restore import Restorer
from millpond.actors.store_spill import Spiller
from millpond.codecs.messages import (
    Admit,
    Cancel,
    MissReason,
    Offer,
    RestoreReport,
    Submit,
    ToEngine,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.errors import EngineError
from millpond.runtime.kv.header import group_folder
from millpond.runtime.kv.plan import Shelves
from millpond.runtime.kv.root import RootStatistics, SpillRoot

__all__ = ["Store", "StoreParts", "StoreStatistics"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures of one store.

    restoring, waiting            requests whose blocks are read, and those before their turn
    spilled_blocks, spilled_bytes files written, and their whole sizes
    duplicates                    offers of blocks that were there
    refused, refusals             offers that were not kept, in all and by reason
    restored_blocks, restored_bytes  files read for admitted requests, and their whole sizes
    misses                        by reason
    problem                       why nothing is spilled now; empty if all is well
    root                          figures of the root, None if there is none
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


@dataclass(slots=True, eq=False)
class _Request:
    """A request from Submit to Admit or Cancel."""

    submit: Submit
    scope: CancelScope
    turn: Event
    cancelled: bool = False
    admitted: bool = False


class Store:
    """Decides what to restore and what to keep; no other actor opens a spill file."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts, self._clock = parts, parts.clock
        self._restores_max = max(1, parts.limits.restores_max)
        self._shelves = _shelves(parts, parts.root) if parts.root is not None else None
        self._restorer: Restorer | None = None
        if parts.root is not None and self._shelves is not None:
            self._restorer = Restorer(parts, parts.root, self._shelves)
        self._spiller = Spiller(parts, parts.root, self._shelves)
        # mutable state, changed only in the loops
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._restoring = 0
        self._offers: Inbox[Offer] | None = None
        self._spilling = False
        self._settled = Event()

    def __repr__(self) -> str:
        figures = self.statistics()
        root = f"{self._parts.root!r}" if self._parts.root is not None else "no spill root"
        return (
            f"<Store {root}, {figures.restoring} restoring, {figures.waiting} waiting, "
            f"{figures.spilled_blocks} spilled, {figures.refused} refused>"
        )

    async def run(
        self, submissions: Inbox[ToStore], offers: Inbox[Offer], admissions: Outbox[ToEngine]
    ) -> None:
        """Serve until both arrows in have ended."""
        self._offers = offers
        async with create_task_group() as loops:
            loops.start_soon(self._admit_all, submissions, admissions)
            loops.start_soon(self._accept_all, offers)
        if self._parts.root is not None:
            with contextlib.suppress(EngineError):
                flush = self._parts.root.flush
                await self._parts.writer.call(flush, self._parts.limits.disk_stall_s)

    async def drain(self, timeout_s: float) -> None:
        """Wait until every offer made so far is written or refused, for ``timeout_s`` at most."""
        with move_on_after(timeout_s):
            while self._spilling or (self._offers and self._offers.statistics().waiting):
                await self._settled.wait()

    def statistics(self) -> StoreStatistics:
        """Return the store's figures."""
        spilled, root, restorer = self._spiller.figures, self._parts.root, self._restorer
        return StoreStatistics(
            restoring=self._restoring,
            waiting=len(self._waiting),
            spilled_blocks=spilled.blocks,
            spilled_bytes=spilled.bytes,
            duplicates=spilled.duplicates,
            refused=spilled.refused.total(),
            refusals={str(reason): count for reason, count in spilled.refused.items()},
            restored_blocks=restorer.blocks if restorer else 0,
            restored_bytes=restorer.bytes if restorer else 0,
            misses=dict(restorer.misses) if restorer else {},
            problem=root.problem if root else "",
            root=root.statistics() if root else None,
        )

    # -- submissions

    async def _admit_all(self, submissions: Inbox[ToStore], admissions: Outbox[ToEngine]) -> None:
        async with submissions, admissions, create_task_group() as requests:
            async for message in submissions:
                match message:
                    case Submit():
                        request = _Request(message, CancelScope(), Event())
                        self._requests[message.request_id] = request
                        if self._restores(message):
                            self._queue(request)
                        requests.start_soon(self._serve, request, admissions)
                    case Cancel():
                        await self._cancel(message, admissions)
                    case _:
                        assert_never(message)

    async def _cancel(self, message: Cancel, admissions: Outbox[ToEngine]) -> None:
        """A request under way is told, and sends its Cancel itself (I1); else pass it on."""
        request = self._requests.get(message.request_id)
        if request is None:
            await admissions.send(Cancel(request_id=message.request_id))
            return
        request.cancelled = True
        request.scope.cancel()

    async def _serve(self, request: _Request, admissions: Outbox[ToEngine]) -> None:
        request_id = request.submit.request_id
        try:
            with request.scope:
                await self._admit(request, admissions)
            if request.cancelled:
                cancel = Cancel(request_id=request_id, before_admit=not request.admitted)
                await admissions.send(cancel)
        finally:
            del self._requests[request_id]

    async def _admit(self, request: _Request, admissions: Outbox[ToEngine]) -> None:
        submit, root, restorer = request.submit, self._parts.root, self._restorer
        if root is None or restorer is None or self._shelves is None or not self._restores(submit):
            admit = _admission(submit, 0, RestoreReport(), (0, (), False))
        else:
            try:
                await request.turn.wait()
                await self._try_again(root)
                restored = await restorer.restore(submit, admissions)
            finally:
                self._end_turn(request)
            plan, tokens = restored.plan, len(submit.token_ids) // 4
            with root.guard:
                full_from = self._shelves.full_from_block(submit.chain)
                sliding = self._shelves.sliding_blocks(submit.chain, tokens, plan)
            offers = (full_from, sliding, not root.problem)
            admit = _admission(submit, plan.boundary, restored.report, offers)
        await admissions.send(admit)
        request.admitted = True  # no checkpoint since the message was taken

    async def _try_again(self, root: SpillRoot) -> None:
        """If spilling is off and it is time, see whether the disk recovered."""
        now = self._clock()
        if root.is_due(now):
            try:
                again = partial(root.try_again, now)
                await self._parts.writer.call(again, self._parts.limits.disk_stall_s)
            except EngineError as error:
                root.turn_off(str(error), now)

    def _restores(self, submit: Submit) -> bool:
        return self._restorer is not None and not submit.no_store

    def _queue(self, request: _Request) -> None:
        if self._restoring < self._restores_max:
            self._restoring += 1
            request.turn.set()
        else:
            self._waiting.append(request)

    def _end_turn(self, request: _Request) -> None:
        if not request.turn.is_set():
            self._waiting.remove(request)
        elif self._waiting:
            self._waiting.popleft().turn.set()
        else:
            self._restoring -= 1

    # -- offers

    async def _accept_all(self, offers: Inbox[Offer]) -> None:
        async with offers:
            try:
                async for message in offers:
                    self._spilling = True
                    try:
                        await self._spiller.accept(message)
                    finally:
                        self._spilling = False
                        self._settled.set()
                        self._settled = Event()
            finally:
                self._spiller.finish()


def _shelves(parts: StoreParts, root: SpillRoot) -> Shelves:
    fingerprint = parts.fingerprint
    return Shelves(parts.layout, lambda group: root.shelf(group_folder(fingerprint, group.name)))


def _admission(
    submit: Submit, prefix: int, report: RestoreReport, offers: tuple[int, tuple[int, ...], bool]
) -> Admit:
    return Admit(
        request_id=submit.request_id,
        token_ids=submit.token_ids,
        root=submit.root,
        chain=submit.chain,
        sampling=submit.sampling,
        prefix_tokens=prefix,
        restored=report,
        full_from_block=offers[0],
        sliding_blocks=offers[1],
        offers=offers[2],
    )
