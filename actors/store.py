"""The store: owns the prefix index's use and the spill files of one house.

Invariants

(I1) Of each request the engine gets its Restores, then its Admit, then possibly Cancel; or, if the
     cancellation came first, possibly Restores, then Cancel(before_admit) and nothing after it.
(I2) Restores of at most ``restores_max`` requests are under way, in the order of the admissions.
(I3) Offers never wait for restores nor restores for offers: each arrow has its loop.  A Held waits
     for no disk: snapshots are set aside for a loop that writes them.
(I4) A request has claimed the memory of its live cache before anything of it is sent, and what had
     to be dropped for that is dropped first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import assert_never

from anyio import CancelScope, Event, create_task_group, move_on_after
from millpond.actors.store_admission import Admission, Request, admission
from millpond.actors.store_parts import StoreParts, StoreStatistics
from millpond.actors.store_pins import Pins
from millpond.actors.store_restore import Restorer
from millpond.actors.store_spill import Spiller
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Drop,
    Held,
    Offer,
    RestoreReport,
    Snapshot,
    Submit,
    ToEngine,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.errors import EngineError
from millpond.runtime.kv.header import group_folder
from millpond.runtime.kv.plan import Shelves
from millpond.runtime.kv.root import SpillRoot

__all__ = ["Store", "StoreParts", "StoreStatistics"]


class Store:
    """Decides what to restore and what to keep; no other actor opens a spill file."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts, self._clock = parts, parts.clock
        self._shelves = _shelves(parts, parts.root) if parts.root is not None else None
        self._restorer: Restorer | None = None
        if parts.root is not None and self._shelves is not None:
            self._restorer = Restorer(parts, parts.root, self._shelves)
        self._spiller = Spiller(parts, parts.root, self._shelves)
        self._pins = Pins(parts, parts.root, self._shelves)
        # mutable state, changed only in the loops
        self._requests: dict[int, Request] = {}
        self._admission = Admission(parts)
        self._offers: Inbox[Offer] | None = None
        self._jobs: deque[Snapshot | Submit] = deque()  # to write, or to pin
        self._offers_ended = self._spilling = False
        self._changed = Event()

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
            while self._is_spilling():
                await self._changed.wait()

    def statistics(self) -> StoreStatistics:
        """Return the store's figures."""
        spilled, root, restorer = self._spiller.figures, self._parts.root, self._restorer
        return StoreStatistics(
            restoring=self._admission.restoring,
            waiting=len(self._requests) - self._admission.restoring,
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
            memory=self._admission.memory.statistics(),
            pins=self._pins.done,
            pins_refused=self._pins.refused,
            pin_problem=self._pins.problem,
        )

    def mark(self, request_id: int) -> tuple[int, ...]:
        """Return numbers that change as a request goes on here; none while it is not here."""
        found = self._requests.get(request_id)
        if found is None:
            return ()
        return (int(found.turn.is_set()), int(found.restore_turn.is_set()))

    # -- submissions

    async def _admit_all(self, submissions: Inbox[ToStore], admissions: Outbox[ToEngine]) -> None:
        async with submissions, admissions, create_task_group() as dropping:
            dropping.start_soon(self._drop_all, admissions)
            async with create_task_group() as requests:
                async for message in submissions:
                    match message:
                        case Submit():
                            request = Request(message, CancelScope(), self._restores(message))
                            self._requests[message.request_id] = request
                            self._pins.want(message)
                            self._admission.enter(request)
                            requests.start_soon(self._serve, request, admissions)
                        case Cancel():
                            await self._cancel(message, admissions)
                        case _:
                            assert_never(message)
            dropping.cancel_scope.cancel()

    async def _drop_all(self, admissions: Outbox[ToEngine]) -> None:
        while True:
            await self._admission.wait_drops()
            await self._send_drops(admissions)

    async def _send_drops(self, admissions: Outbox[ToEngine]) -> None:
        """Send what was decided to be dropped by now; sent twice it is no news."""
        drops = self._admission.drops
        while drops:
            held_id = drops[0]
            await admissions.send(Drop(request_id=held_id))
            if drops and drops[0] == held_id:
                drops.popleft()

    async def _cancel(self, message: Cancel, admissions: Outbox[ToEngine]) -> None:
        """A request under way is told, and sends its Cancel itself (I1); else pass it on."""
        request = self._requests.get(message.request_id)
        if request is None:
            await admissions.send(Cancel(request_id=message.request_id))
            return
        request.cancelled = True
        request.scope.cancel()

    async def _serve(self, request: Request, admissions: Outbox[ToEngine]) -> None:
        try:
            with request.scope:
                await self._admit(request, admissions)
            if request.cancelled:
                cancel = Cancel(request_id=request.id, before_admit=not request.admitted)
                await admissions.send(cancel)
        finally:
            del self._requests[request.id]
            if not request.admitted:
                self._pins.take(request.id)
            self._admission.leave(request)

    async def _admit(self, request: Request, admissions: Outbox[ToEngine]) -> None:
        await request.turn.wait()
        await self._send_drops(admissions)
        leader = self._requests.get(request.choice_of)
        if leader is not None and leader is not request:
            await leader.over.wait()
        if self._reads_more(request):
            self._admission.let_go(request)
            admit = await self._restore(request, admissions)
        else:
            admit = self._share(request)
        await admissions.send(admit)
        request.admitted = True  # no checkpoint since the message was taken

    def _reads_more(self, request: Request) -> bool:
        """True iff the disk may have more of the prompt than the live caches."""
        restorer = self._restorer
        if restorer is None or not request.may_restore or self._admission.has_leader(request):
            return False
        return request.held is None or restorer.reach(request.submit) > request.held.tokens

    async def _restore(self, request: Request, admissions: Outbox[ToEngine]) -> Admit:
        submit, root, restorer = request.submit, self._parts.root, self._restorer
        assert root is not None and restorer is not None and self._shelves is not None
        self._admission.begin_restore(request)
        await request.restore_turn.wait()
        try:
            await self._try_again(root)
            restored = await restorer.restore(submit, admissions)
        finally:
            self._admission.end_restore(request)
        plan, tokens = restored.plan, len(submit.token_ids) // 4
        with root.guard:
            full_from = self._shelves.full_from_block(submit.chain)
            sliding = self._shelves.sliding_blocks(submit.chain, tokens, plan)
        offers = (full_from, sliding, not root.problem)
        return admission(request, plan.boundary, restored.report, offers)

    def _share(self, request: Request) -> Admit:
        """Nothing is read: a live cache has the prefix, or the request begins cold."""
        submit, root = request.submit, self._parts.root
        self._admission.end_restore(request)
        prefix = request.held.tokens if request.held is not None else 0
        if root is None or self._restorer is None or self._shelves is None or submit.no_store:
            return admission(request, prefix, RestoreReport(), (0, (), False))
        report, offers = self._restorer.look(submit, prefix)
        return admission(request, prefix, report, (*offers, not root.problem))

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

    # -- offers

    async def _accept_all(self, offers: Inbox[Offer]) -> None:
        async with offers, create_task_group() as loops:
            loops.start_soon(self._spill_all)
            async for message in offers:
                match message:
                    case Snapshot():  # at most as many as the pool has slots
                        self._jobs.append(message)
                    case Held():
                        self._admission.end(message)
                        if (pinned := self._pins.take(message.request_id)) is not None:
                            self._jobs.append(pinned)
                    case _:
                        assert_never(message)
                self._change()
            self._offers_ended = True
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = Event()

    async def _spill_all(self) -> None:
        try:
            while self._jobs or not self._offers_ended:
                if not self._jobs:
                    await self._changed.wait()
                    continue
                self._spilling = True
                try:
                    await self._do(self._jobs.popleft())
                finally:
                    self._spilling = False
                    self._change()
        finally:
            self._spiller.finish()

    async def _do(self, job: Snapshot | Submit) -> None:
        match job:
            case Snapshot():
                await self._spiller.accept(job)
            case Submit():
                await self._pins.pin(job)
            case _:
                assert_never(job)

    def _is_spilling(self) -> bool:
        waiting = self._offers.statistics().waiting if self._offers is not None else 0
        return self._spilling or bool(self._jobs or waiting)


def _shelves(parts: StoreParts, root: SpillRoot) -> Shelves:
    fingerprint = parts.fingerprint
    return Shelves(parts.layout, lambda group: root.shelf(group_folder(fingerprint, group.name)))
