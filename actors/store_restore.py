"""The store's restores: plan, read and verify, send block by block; start over after a bad block.

Invariants

(I1) A slot is in exactly one place: lent here, or in a Restore that was sent.
(I2) Planes of one request are sent in the order of its plan, however many reads are in flight.
(I3) Whoever waits for a slot holds none, so restores never wait for each other.
(I4) A block whose file is bad is not read again: it leaves the index before the next plan.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from anyio import Event, create_task_group
from anyio.abc import TaskGroup
from millpond.actors.store_parts import StoreParts
from millpond.codecs.messages import MissReason, Restore, RestoreReport, Submit, ToEngine
from millpond.runtime.channels import Outbox
from millpond.runtime.errors import BlockError, EngineError
from millpond.runtime.kv.files import (
    Part,
    block_parts,
    file_bytes,
    read_block,
    read_part,
    verify_block,
)
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.plan import NO_PLAN, Plan, Shelves, WantedBlock
from millpond.runtime.kv.root import SpillRoot
from millpond.runtime.staging import Lease, SlotsLost
from millpond.runtime.threads import Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore put in place: the plan that succeeded, and the report for the caller."""

    plan: Plan
    report: RestoreReport


class _Failure(Exception):
    """A block of the plan could not be restored.

    detail  for the quarantine's note, None if the file need not move there
    gone    there is no such file any more
    """

    def __init__(self, wanted: WantedBlock, reason: MissReason, detail: str | None) -> None:
        super().__init__(reason)
        self.wanted, self.reason, self.detail = wanted, reason, detail
        self.gone = False


@dataclass(slots=True, eq=False)
class _Read:
    """One read in flight.  ``stuck``: a thread that serves no more may still write to the slot."""

    wanted: WantedBlock
    identity: BlockIdentity
    part: Part
    digest: bytes | None
    lease: Lease
    done: Event = field(default_factory=Event)
    error: Exception | None = None
    stuck: bool = False
    sent: bool = False


@dataclass(slots=True)
class _Attempt:
    """One attempt at a plan: the reads in flight, oldest first, and every read that has a slot."""

    submit: Submit
    admissions: Outbox[ToEngine]
    starts_over: bool
    boundary: int
    pending: deque[_Read] = field(default_factory=deque)
    held: list[_Read] = field(default_factory=list)


class Restorer:
    """Used by the store only, on the event loop."""

    def __init__(self, parts: StoreParts, root: SpillRoot, shelves: Shelves) -> None:
        self._parts, self._root, self._shelves = parts, root, shelves
        self._layout, self._pool, self._limits = parts.layout, parts.restore_pool, parts.limits
        # mutable state, changed only in restore and _call
        self._readers: deque[Worker] = deque(parts.readers)
        self.blocks = self.bytes = 0
        self.misses: Counter[MissReason] = Counter()

    async def restore(self, submit: Submit, admissions: Outbox[ToEngine]) -> Restored:
        """Send the longest verified prefix of a prompt; fewer tokens after each bad block."""
        started = self._parts.clock()
        limit = self._layout.reuse_limit(len(submit.token_ids) // 4)
        misses: Counter[MissReason] = Counter()
        with self._root.guard:
            plan = self._shelves.plan(submit.chain, limit)
            if plan.boundary < limit:
                misses[self._shelves.why_not_more(submit.chain, plan.boundary)] += 1
            matched = self._shelves.matched_tips(submit.chain, plan.matched)
        plan = await self._try_plans(submit, admissions, plan, misses)
        self._root.use((*matched, *plan.tips))
        report = RestoreReport(
            blocks=len(plan.blocks),
            bytes=sum(file_bytes(self._identity(submit, one)) for one in plan.blocks),
            restore_ms=1e3 * (self._parts.clock() - started),
            misses=dict(misses),
        )
        self.blocks += report.blocks
        self.bytes += report.bytes
        self.misses.update(misses)
        return Restored(plan, report)

    def reach(self, submit: Submit) -> int:
        """Return how many tokens of a prompt the index promises now."""
        limit = self._layout.reuse_limit(len(submit.token_ids) // 4)
        with self._root.guard:
            return self._shelves.plan(submit.chain, limit).boundary

    def look(
        self, submit: Submit, tokens: int
    ) -> tuple[RestoreReport, tuple[int, tuple[int, ...]]]:
        """Of a prompt that begins with ``tokens`` in a live cache: what is missing on the disk.

        Returns the report, the first block to offer of full groups, and those of sliding ones.
        """
        shelves, prompt = self._shelves, len(submit.token_ids) // 4
        misses: dict[MissReason, int] = {}
        with self._root.guard:
            plan = replace(shelves.plan(submit.chain, tokens), boundary=tokens)
            if tokens < self._layout.reuse_limit(prompt):
                misses[shelves.why_not_more(submit.chain, tokens)] = 1
            matched = shelves.matched_tips(submit.chain, plan.matched)
            full_from = shelves.full_from_block(submit.chain)
            sliding = shelves.sliding_blocks(submit.chain, prompt, plan)
        self._root.use((*matched, *plan.tips))
        self.misses.update(misses)
        return RestoreReport(misses=misses), (full_from, sliding)

    async def _try_plans(
        self,
        submit: Submit,
        admissions: Outbox[ToEngine],
        plan: Plan,
        misses: Counter[MissReason],
    ) -> Plan:
        """Return the plan that succeeded, an empty one in the end."""
        for attempt in range(self._limits.restore_attempts_max):
            if not plan.boundary:
                return plan
            failure = await self._try(
                _Attempt(submit, admissions, attempt > 0, plan.boundary), plan
            )
            if failure is None:
                return plan
            misses[self._reason(submit, failure)] += 1
            await self._set_aside(failure)
            behind = failure.wanted.index * self._layout.block_tokens
            limit = behind // self._layout.chunk_tokens * self._layout.chunk_tokens
            with self._root.guard:
                plan = self._shelves.plan(submit.chain, limit if self._readers else 0)
        return NO_PLAN

    async def _try(self, attempt: _Attempt, plan: Plan) -> _Failure | None:
        """Send every block of a plan; return what went wrong, all slots given back."""
        with self._root.guard:
            self._root.index.pin(plan.tips)
        failure: _Failure | None = None
        try:
            async with create_task_group() as reads:
                try:
                    await self._send_all(attempt, plan, reads)
                except _Failure as error:
                    failure = error
                    reads.cancel_scope.cancel()
        finally:
            with self._root.guard:
                self._root.index.unpin(plan.tips)
            for read in attempt.held:
                if not read.sent:
                    self._give(read.lease, read.stuck)
        return failure

    async def _send_all(self, attempt: _Attempt, plan: Plan, reads: TaskGroup) -> None:
        for wanted in plan.blocks:
            identity = self._identity(attempt.submit, wanted)
            parts = block_parts(identity, self._pool.slot_bytes)
            digests: tuple[bytes | None, ...] = (None,)
            if len(parts) > 1:
                digests = await self._verify(attempt, wanted, identity, parts)
            for part, digest in zip(parts, digests, strict=True):
                lease = await self._lend(attempt, wanted, part.size)
                read = _Read(wanted, identity, part, digest, lease)
                attempt.held.append(read)
                attempt.pending.append(read)
                reads.start_soon(self._read, read)
        while attempt.pending:
            await self._send_oldest(attempt)

    async def _verify(
        self,
        attempt: _Attempt,
        wanted: WantedBlock,
        identity: BlockIdentity,
        parts: tuple[Part, ...],
    ) -> tuple[bytes, ...]:
        """Verify a block that is larger than a slot, before any of it is sent."""
        lease = await self._lend(attempt, wanted, parts[0].size)
        job = partial(verify_block, self._root.disk, identity, parts, lease.buffer)
        stuck = False
        try:
            return await self._call(wanted, job)
        except EngineError as error:
            stuck = True
            raise _failure(wanted, error) from error
        except (BlockError, OSError) as error:
            raise _failure(wanted, error) from error
        finally:
            self._give(lease, stuck)

    async def _lend(self, attempt: _Attempt, wanted: WantedBlock, size: int) -> Lease:
        """Take a slot, sending what was read already rather than waiting (I3)."""
        depth = len(self._readers) + 1
        while attempt.pending and (len(attempt.pending) >= depth or not self._pool.available()):
            await self._send_oldest(attempt)
        lease = self._pool.try_lend(size) if self._pool.available() else None
        if lease is not None:
            return lease
        try:
            return await self._pool.lend(size)
        except SlotsLost as error:
            raise _Failure(wanted, "io_error", None) from error

    async def _read(self, read: _Read) -> None:
        """Fill a slot with verified bytes."""
        disk, block, buffer = self._root.disk, read.identity, read.lease.buffer
        job = partial(read_block, disk, block, buffer)
        if read.digest is not None:
            job = partial(read_part, disk, block, read.part, read.digest, buffer)
        try:
            await self._call(read.wanted, job)
        except EngineError as error:
            read.stuck, read.error = True, error
        except (BlockError, OSError, _Failure) as error:
            read.error = error
        read.done.set()

    async def _call(self, wanted: WantedBlock, job: Callable[[], T]) -> T:
        """Run a job on the reader whose turn it is; one that is stuck gets no other."""
        if not self._readers:
            raise _Failure(wanted, "io_error", None)
        self._readers.rotate(-1)
        worker = self._readers[-1]
        try:
            return await worker.call(job, self._limits.disk_stall_s)
        except EngineError:
            if worker in self._readers:
                self._readers.remove(worker)
            raise

    async def _send_oldest(self, attempt: _Attempt) -> None:
        read = attempt.pending[0]
        await read.done.wait()
        if read.error is not None:
            raise _failure(read.wanted, read.error) from read.error
        message = Restore(
            request_id=attempt.submit.request_id,
            group=read.wanted.group.index,
            first_token=read.identity.first_token,
            first_plane=read.part.first_plane,
            planes=read.part.planes,
            slot=read.lease.slot,
            lease=read.lease.lease,
            payload_bytes=read.part.size,
            starts_over=attempt.starts_over,
            context_tokens=len(attempt.submit.token_ids) // 4 + attempt.submit.sampling.max_tokens,
            boundary=attempt.boundary,
        )
        await attempt.admissions.send(message)
        read.sent, attempt.starts_over = True, False
        attempt.pending.popleft()
        attempt.held.remove(read)

    async def _set_aside(self, failure: _Failure) -> None:
        """Take what failed out of the index (I4); a file that only could not be read stays."""
        if failure.detail is None and not failure.gone:
            return
        verdict = (failure.reason, failure.detail) if failure.detail is not None else None
        now = self._parts.clock()
        forget = partial(self._root.forget, failure.wanted.entry, verdict, now)
        try:
            await self._parts.writer.call(forget, self._limits.disk_stall_s)
        except EngineError as error:
            self._root.turn_off(str(error), now)

    def _reason(self, submit: Submit, failure: _Failure) -> MissReason:
        wanted = failure.wanted
        with self._root.guard:
            name = submit.chain[wanted.index]
            is_elsewhere = self._shelves.has_elsewhere(wanted.group, name)
        return "incomplete_group" if failure.gone and is_elsewhere else failure.reason

    def _give(self, lease: Lease, stuck: bool) -> None:
        if stuck:
            self._pool.lose(lease.slot, lease.lease)
        else:
            self._pool.give(lease.slot, lease.lease)

    def _identity(self, submit: Submit, wanted: WantedBlock) -> BlockIdentity:
        tokens, index = self._layout.block_tokens, wanted.index
        return BlockIdentity(
            fingerprint=self._parts.fingerprint,
            guard=self._parts.guard,
            group=wanted.group,
            block_tokens=tokens,
            first_token=index * tokens,
            chain_hash=submit.chain[index],
            parent=submit.chain[index - 1] if index else submit.root,
            token_ids=submit.token_ids[4 * index * tokens : 4 * (index + 1) * tokens],
            seal=self._root.options.seal,
        )


def _failure(wanted: WantedBlock, error: Exception) -> _Failure:
    """Tell what an error means for the block: bad, gone, or only out of reach."""
    match error:
        case _Failure():
            return error
        case BlockError():
            return _Failure(
                wanted, "mismatch" if error.reason == "mismatch" else "corrupt", str(error)
            )
        case FileNotFoundError():
            gone = _Failure(wanted, "absent", None)
            gone.gone = True
            return gone
        case OSError() if error.errno == errno.EIO:
            return _Failure(wanted, "io_error", "the system could not read it")
        case _:
            return _Failure(wanted, "io_error", None)
