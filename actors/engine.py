"""The engine: owns the pinned thread, the weights, the live caches and the running sequences.

Invariants

(I1) Every request that came as Admit, or as Cancel before its Admit, ends with exactly one
     Finished, and after an Admit with exactly one Held, which is sent first if the request ran.
(I2) Decoding never waits for the disk: an offer takes a free slot and room in the arrow, or is
     refused and counted; the store takes a Held whatever its disk does.
(I3) After the pinned thread broke, slots it may still touch are lost, and every request ends with
     the thread's error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from anyio import Event, create_task_group
from millpond.actors.engine_batch import Batch, Plan
from millpond.actors.engine_loading import load
from millpond.actors.engine_parts import EngineParts, EngineStatistics
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Drop,
    Finished,
    Held,
    Offer,
    Ready,
    Restore,
    Stopped,
    ToEngine,
    ToGateway,
    Weights,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.errors import EngineError
from millpond.runtime.sequence import Sequence
from millpond.runtime.steps import StepResult

__all__ = ["Engine", "EngineParts", "EngineStatistics"]


class Engine:
    """Weights in; then plan → run on the pinned thread → apply, until the admissions end."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        # mutable state, changed only in _receive, _serve and what they call
        self._batch = Batch(parts)
        self._notes: deque[Held] = deque()  # of requests that ended before they ran
        self._ended = False
        self._problem: EngineError | None = None
        self._work = Event()

    def __repr__(self) -> str:
        batch = self._batch
        state = str(self._problem) if self._problem else f"{len(batch.running)} running"
        return f"<Engine {state}, {len(batch.waiting)} waiting, {batch.steps} steps>"

    async def run(
        self,
        weights: Inbox[Weights],
        admissions: Inbox[ToEngine],
        offers: Outbox[Offer],
        tokens: Outbox[ToGateway],
    ) -> None:
        """Load, then serve; raises ModelError if the model cannot be loaded."""
        async with admissions, offers, tokens:
            started = self._parts.clock()
            await load(self._parts, weights)
            await tokens.send(Ready(load_ms=1e3 * (self._parts.clock() - started)))
            async with create_task_group() as loops:
                loops.start_soon(self._receive, admissions, tokens)
                loops.start_soon(self._serve, _Out(offers, tokens))
        if self._problem is None:
            close = self._parts.runner.close
            await self._parts.thread.call(close, self._parts.limits.engine_stall_s)

    def statistics(self) -> EngineStatistics:
        """Return the engine's figures."""
        batch = self._batch
        return EngineStatistics(
            waiting=len(batch.waiting),
            running=len(batch.running),
            restoring=len(batch.restores),
            steps=batch.steps,
            prefilled_tokens=batch.prefilled_tokens,
            decoded_tokens=batch.decoded_tokens,
            offered=batch.offers.offered,
            refused=batch.offers.refused,
            problem=str(self._problem) if self._problem else "",
            held=len(batch.sharing),
            shared_tokens=batch.sharing.shared_tokens,
        )

    def mark(self, request_id: int) -> tuple[int, ...]:
        """Return numbers that change as a request goes on here; none while it is not here."""
        found = self._batch.running.get(request_id)
        if found is None:
            return (0,) if request_id in self._batch.waiting else ()
        return (1, found.prefilled, len(found.completion))

    # -- admissions

    async def _receive(self, admissions: Inbox[ToEngine], tokens: Outbox[ToGateway]) -> None:
        batch = self._batch
        async for message in admissions:
            match message:
                case Restore() if self._problem is not None:
                    batch.restores.give((message,))
                case Restore():
                    batch.restores.take(message)
                case Admit():
                    await self._admit(batch.sequence(message), tokens)
                case Cancel():
                    await self._cancel(message, tokens)
                case Drop():
                    batch.drop(message.request_id)
                case _:
                    assert_never(message)
            self._wake()
        self._ended = True
        self._wake()

    async def _admit(self, sequence: Sequence, tokens: Outbox[ToGateway]) -> None:
        if self._problem is None:
            self._batch.admit(sequence)
        else:
            await self._end_early(sequence, _failed(sequence, self._problem), tokens)

    async def _cancel(self, message: Cancel, tokens: Outbox[ToGateway]) -> None:
        running = self._batch.running.get(message.request_id)
        if running is not None:
            running.cancelled = True
            return
        waiting = self._batch.withdraw(message.request_id)
        if message.before_admit:
            await tokens.send(Finished(request_id=message.request_id, reason="cancelled"))
        elif waiting is not None:
            await self._end_early(waiting, waiting.finished("cancelled"), tokens)

    async def _end_early(
        self, sequence: Sequence, message: Finished, tokens: Outbox[ToGateway]
    ) -> None:
        """The Held of a sequence that does not run goes out between two steps."""
        self._notes.append(Held(request_id=sequence.id))
        await tokens.send(message)

    # -- steps

    async def _serve(self, out: _Out) -> None:
        while True:
            await self._end_cancelled(out)
            while self._notes:
                await out.offers.send(self._notes.popleft())
            plan = self._batch.plan(out.offers.room()) if self._problem is None else None
            if plan is None or not plan.step:
                if self._is_done():
                    return
                if not self._batch.frees:
                    await self._work.wait()
                continue
            try:
                result = await self._run(plan)
            except EngineError as error:
                await self._break(error, plan, out)
                continue
            for message in self._batch.apply(plan, result, out.offers):
                await out.tokens.send(message)
            for sequence, finished in self._batch.ended(result):
                await self._end(sequence, finished, out)

    def _is_done(self) -> bool:
        """True once nothing can come any more and no cache is left to be freed."""
        if not self._ended or len(self._batch) or self._notes:
            return False
        if self._problem is None:
            self._batch.free_held()
        return not self._batch.frees

    def _wake(self) -> None:
        self._work.set()
        self._work = Event()

    async def _end_cancelled(self, out: _Out) -> None:
        for sequence in [one for one in self._batch.running.values() if one.cancelled]:
            await self._end(sequence, sequence.finished("cancelled"), out)

    async def _end(self, sequence: Sequence, message: Finished, out: _Out) -> None:
        await out.offers.send(self._batch.end(sequence, message))
        await out.tokens.send(message)

    async def _run(self, plan: Plan) -> StepResult:
        limits = self._parts.limits
        is_warm = self._batch.decoded_tokens > 0
        stall_s = limits.engine_stall_s if is_warm else limits.engine_warm_s
        return await self._parts.thread.call(partial(self._parts.runner.run, plan.step), stall_s)

    async def _break(self, error: EngineError, plan: Plan, out: _Out) -> None:
        """The pinned thread is gone: every request ends with its error, slots it holds are lost."""
        self._problem = error
        sequences = self._batch.lose(plan)
        await out.tokens.send(Stopped(error=str(error), error_type=type(error).__name__))
        for sequence in sequences:
            await self._end_early(sequence, _failed(sequence, error), out.tokens)


@dataclass(frozen=True, slots=True)
class _Out:
    """The arrows out."""

    offers: Outbox[Offer]
    tokens: Outbox[ToGateway]


def _failed(sequence: Sequence, error: EngineError) -> Finished:
    return sequence.finished("error", str(error), type(error).__name__)
