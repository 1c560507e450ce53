"""The engine: owns the pinned thread, the weights, the live caches and the running sequences.

Invariants

(I1) Every request that came as Admit, or as Cancel before its Admit, ends with exactly one
     Finished.
(I2) A step runs restores before prefills, so rows are in place when their sequence starts.
(I3) Decoding never waits for the store: an offer takes a free slot and room in the arrow, or is
     refused and counted.
(I4) After the pinned thread broke, slots it may still touch are lost, and every request ends with
     the thread's error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from anyio import Event, create_task_group
from millpond.actors.engine_offers import Offers
from millpond.actors.engine_restores import Restores
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Finished,
    Loaded,
    Offer,
    Ready,
    Restore,
    Tensor,
    ToEngine,
    ToGateway,
    Tokens,
    Weights,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.config import Limits
from millpond.runtime.errors import EngineError, ModelUnreadable
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.scheduler import Turn, admissible, next_turn
from millpond.runtime.sequence import Sequence, whole_blocks
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import PrefillChunk, Runner, Step, StepResult
from millpond.runtime.threads import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of.

    runner          runs on ``thread`` and nowhere else
    thread          the pinned thread
    layout          groups and grid
    context_tokens  tokens that prompt and completion may reach
    end_ids         token ids that end a completion
    weight_pool, restore_pool, spill_pool  staging
    limits          bounds
    clock           monotonic seconds
    """

    runner: Runner
    thread: Worker
    layout: KvLayout
    context_tokens: int
    end_ids: frozenset[int]
    weight_pool: StagingPool
    restore_pool: StagingPool
    spill_pool: StagingPool
    limits: Limits
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Requests by state, steps run, tokens computed, and why the thread serves no more."""

    waiting: int
    running: int
    restoring: int
    steps: int
    prefilled_tokens: int
    decoded_tokens: int
    offered: int
    refused: int
    problem: str


class Engine:
    """Weights in; then plan → run on the pinned thread → apply, until the admissions end."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._layout, self._limits = parts.layout, parts.limits
        # mutable state, changed only in _receive, _plan, _apply and _break
        self._restores = Restores(parts.layout, parts.restore_pool, parts.limits)
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: OrderedDict[int, Sequence] = OrderedDict()
        self._frees: list[int] = []
        self._ended = False
        self._problem: EngineError | None = None
        self._work = Event()
        self._steps = self._prefilled = self._decoded = 0
        self._offers = Offers(parts.layout, parts.spill_pool)

    def __repr__(self) -> str:
        state = str(self._problem) if self._problem else f"{len(self._running)} running"
        return f"<Engine {state}, {len(self._waiting)} waiting, {self._steps} steps>"

    async def run(
        self,
        weights: Inbox[Weights],
        admissions: Inbox[ToEngine],
        offers: Outbox[Offer],
        tokens: Outbox[ToGateway],
    ) -> None:
        """Load, then serve; raises ModelError if the model cannot be loaded."""
        async with admissions, offers, tokens:
            await self._load(weights, tokens)
            async with create_task_group() as loops:
                loops.start_soon(self._receive, admissions, tokens)
                loops.start_soon(self._serve, offers, tokens)
        await self._close()

    def statistics(self) -> EngineStatistics:
        """Return the engine's figures."""
        return EngineStatistics(
            waiting=len(self._waiting),
            running=len(self._running),
            restoring=len(self._restores),
            steps=self._steps,
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            offered=self._offers.offered,
            refused=self._offers.refused,
            problem=str(self._problem) if self._problem else "",
        )

    # -- weights

    async def _load(self, weights: Inbox[Weights], tokens: Outbox[ToGateway]) -> None:
        started = self._parts.clock()
        pool, call = self._parts.weight_pool, self._parts.thread.call
        loaded = False
        async with weights:
            async for message in weights:
                match message:
                    case Tensor():
                        view = pool.view(message.slot, message.lease, message.payload_bytes)
                        copy = partial(self._parts.runner.load_rows, message, view)
                        await call(copy, self._limits.engine_warm_s)
                        pool.give(message.slot, message.lease)
                    case Loaded():
                        if message.error:
                            raise ModelUnreadable(message.error)
                        loaded = True
                    case _:
                        assert_never(message)
        if not loaded:
            raise ModelUnreadable("the weights ended before the loader said so")
        await call(self._parts.runner.finish_load, self._limits.engine_warm_s)
        await tokens.send(Ready(load_ms=1e3 * (self._parts.clock() - started)))

    # -- admissions

    async def _receive(self, admissions: Inbox[ToEngine], tokens: Outbox[ToGateway]) -> None:
        async for message in admissions:
            match message:
                case Restore() if self._problem is not None:
                    self._restores.give((message,))
                case Restore():
                    self._restores.take(message)
                case Admit():
                    await self._admit(message, tokens)
                case Cancel():
                    await self._cancel(message, tokens)
                case _:
                    assert_never(message)
            self._wake()
        self._ended = True
        self._wake()

    async def _admit(self, message: Admit, tokens: Outbox[ToGateway]) -> None:
        cold = self._restores.is_cold(message.request_id)
        prefix = 0 if cold else message.prefix_tokens
        sequence = Sequence(message, self._parts.context_tokens, prefix, prefix)
        if self._problem is not None:
            await tokens.send(self._failed(sequence))
            return
        self._waiting[sequence.id] = sequence

    async def _cancel(self, message: Cancel, tokens: Outbox[ToGateway]) -> None:
        request_id = message.request_id
        if message.before_admit:
            self._forget(request_id)
            await tokens.send(Finished(request_id=request_id, reason="cancelled"))
        elif request_id in self._running:
            self._running[request_id].cancelled = True
        elif request_id in self._waiting:
            sequence = self._waiting.pop(request_id)
            self._forget(request_id)
            await tokens.send(sequence.finished("cancelled"))

    def _forget(self, request_id: int) -> None:
        if self._restores.forget(request_id):
            self._frees.append(request_id)

    # -- steps

    async def _serve(self, offers: Outbox[Offer], tokens: Outbox[ToGateway]) -> None:
        while True:
            await self._end_cancelled(tokens)
            plan = self._plan(offers.room())
            if not plan.step:
                if self._ended and not self._waiting and not self._running:
                    return
                await self._work.wait()
                continue
            try:
                result = await self._run(plan)
            except EngineError as error:
                await self._break(error, plan, tokens)
                continue
            await self._apply(plan, result, offers, tokens)

    def _wake(self) -> None:
        self._work.set()
        self._work = Event()

    async def _end_cancelled(self, tokens: Outbox[ToGateway]) -> None:
        for sequence in [one for one in self._running.values() if one.cancelled]:
            await self._end(sequence, sequence.finished("cancelled"), tokens)

    async def _end(self, sequence: Sequence, message: Finished, tokens: Outbox[ToGateway]) -> None:
        del self._running[sequence.id]
        self._frees.append(sequence.id)
        await tokens.send(message)

    def _plan(self, room: int) -> _Plan:
        """Decide the next step; takes slots for offers, frees and restores from their queues."""
        if self._problem is not None:
            self._frees.clear()
            return _Plan(Step(), (), Turn(None, ()), None)
        restores = self._restores.due(len(self._running))
        self._start_waiting()
        turn = next_turn(tuple(self._running.values()))
        chunk = turn.prefill.next_chunk(self._layout.chunk_tokens) if turn.prefill else None
        if turn.prefill is not None and chunk is not None:
            self._offers.prepare(turn.prefill, whole_blocks(chunk, self._layout), room)
        step = Step(
            frees=tuple(dict.fromkeys(self._frees)),
            restores=tuple(
                self._restores.planes(message, self._parts.context_tokens) for message in restores
            ),
            prefills=(chunk,) if chunk is not None else (),
            decodes=tuple(sequence.next_decode() for sequence in turn.decode),
            snapshots=self._offers.planes(),
        )
        self._frees.clear()
        return _Plan(step, restores, turn, chunk)

    def _start_waiting(self) -> None:
        running = len(self._running)
        for _ in range(admissible(len(self._waiting), running, self._limits.sequences_max)):
            request_id, sequence = self._waiting.popitem(last=False)
            if self._restores.start(request_id) and not sequence.prefilled:
                self._frees.append(request_id)
            self._running[request_id] = sequence

    async def _run(self, plan: _Plan) -> StepResult:
        limits = self._limits
        stall_s = limits.engine_stall_s if self._decoded else limits.engine_warm_s
        return await self._parts.thread.call(partial(self._parts.runner.run, plan.step), stall_s)

    async def _apply(
        self,
        plan: _Plan,
        result: StepResult,
        offers: Outbox[Offer],
        tokens: Outbox[ToGateway],
    ) -> None:
        self._steps += 1
        self._restores.give(plan.restores)
        self._offers.send(result.snapshot_xxh3, result.failures, offers)
        self._progress(plan, result)
        for sampled in result.sampled:
            sequence = self._running[sampled.sequence_id]
            sequence.completion.append(sampled.token_id)
            digests = (sampled.logits_xxh3,) if sampled.logits_xxh3 else ()
            logprobs = (sampled.logprob,) if sampled.logprob is not None else ()
            await tokens.send(
                Tokens(
                    request_id=sequence.id,
                    first_index=len(sequence.completion) - 1,
                    token_ids=(sampled.token_id,),
                    logits_xxh3=digests,
                    logprobs=logprobs,
                )
            )
        await self._finish(result, tokens)

    def _progress(self, plan: _Plan, result: StepResult) -> None:
        if plan.chunk is not None and plan.turn.prefill is not None:
            count = len(plan.chunk.token_ids) // 4
            if plan.turn.prefill.id not in result.failures:
                plan.turn.prefill.prefilled += count
                self._prefilled += count
            plan.turn.prefill.prefill_ms += result.prefill_ms
        for sequence in plan.turn.decode:
            sequence.decode_ms += result.decode_ms
        self._decoded += len(result.sampled)

    async def _finish(self, result: StepResult, tokens: Outbox[ToGateway]) -> None:
        for request_id, problem in result.failures.items():
            if not self._starts_cold(request_id):
                sequence = self._running[request_id]
                await self._end(sequence, sequence.finished("error", problem), tokens)
        for sequence in tuple(self._running.values()):
            reason = sequence.end_reason(self._parts.end_ids)
            if reason is not None:
                await self._end(sequence, sequence.finished(reason), tokens)

    def _starts_cold(self, request_id: int) -> bool:
        """After a failure: True iff only restored rows were lost, and the request starts afresh."""
        self._frees.append(request_id)
        if request_id not in self._waiting and request_id not in self._running:
            self._restores.fail(request_id)
            return True
        self._restores.start(request_id)
        sequence = self._waiting.get(request_id) or self._running[request_id]
        if sequence.prefilled > sequence.cached or (
            request_id in self._running and not sequence.cached
        ):
            return False
        sequence.prefilled = sequence.cached = 0
        return True

    # -- the end

    def _failed(self, sequence: Sequence) -> Finished:
        return sequence.finished("error", str(self._problem), type(self._problem).__name__)

    async def _break(self, error: EngineError, plan: _Plan, tokens: Outbox[ToGateway]) -> None:
        """The pinned thread is gone: every request ends with its error, slots it holds are lost."""
        self._problem = error
        self._restores.clear(plan.restores)
        self._offers.lose()
        sequences = [*self._running.values(), *self._waiting.values()]
        self._running.clear()
        self._waiting.clear()
        for sequence in sequences:
            await tokens.send(self._failed(sequence))

    async def _close(self) -> None:
        if self._problem is None:
            await self._parts.thread.call(self._parts.runner.close, self._limits.engine_stall_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step and what its result means."""

    step: Step
    restores: tuple[Restore, ...]
    turn: Turn
    chunk: PrefillChunk | None
