"""The engine's sequences and their live caches: what the next step is, and what its result means.

Nothing here waits; the engine sends what comes of it.

Invariants

(I1) A sequence is either waiting or running; once it ended, its cache is held or will be freed.
(I2) A step runs forks and restores before prefills, so rows are in place when their sequence
     starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from millpond.actors.engine_offers import Offers
from millpond.actors.engine_parts import EngineParts
from millpond.actors.engine_restores import Restores
from millpond.actors.engine_sharing import Sharing, twin_of
from millpond.codecs.messages import Admit, Finished, Held, Offer, Restore, Tokens
from millpond.runtime.channels import Outbox
from millpond.runtime.scheduler import Turn, admissible, next_turn
from millpond.runtime.sequence import Sequence, whole_blocks
from millpond.runtime.steps import PrefillChunk, Sampled, Step, StepResult


@dataclass(frozen=True, slots=True)
class Plan:
    """A step and what its result means."""

    step: Step
    restores: tuple[Restore, ...]
    turn: Turn
    chunk: PrefillChunk | None
    twins: tuple[Sequence, ...]


class Batch:
    """Used by the engine only, on the event loop."""

    def __init__(self, parts: EngineParts) -> None:
        self._layout, self._limits, self._context = parts.layout, parts.limits, parts.context_tokens
        self._end_ids = parts.end_ids
        # mutable state, changed only in the methods
        self.restores = Restores(parts.layout, parts.restore_pool, parts.context_tokens)
        self.offers = Offers(parts.layout, parts.spill_pool)
        self.sharing = Sharing(parts.layout)
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: OrderedDict[int, Sequence] = OrderedDict()
        self.frees: list[int] = []
        self.steps = self.prefilled_tokens = self.decoded_tokens = 0

    def __len__(self) -> int:
        """Count of sequences that have not ended."""
        return len(self.waiting) + len(self.running)

    # -- requests in, and out before they run

    def sequence(self, message: Admit) -> Sequence:
        """Return the sequence of an Admit, cold if what was restored is lost."""
        cold = self.restores.is_cold(message.request_id)
        prefix = 0 if cold else message.prefix_tokens
        return Sequence(message, self._context, prefix, prefix)

    def admit(self, sequence: Sequence) -> None:
        """The sequence waits to run."""
        self.sharing.admit(sequence)
        self.waiting[sequence.id] = sequence

    def withdraw(self, request_id: int) -> Sequence | None:
        """Forget a request that does not run yet; return its sequence if it was admitted."""
        if self.restores.forget(request_id):
            self.frees.append(request_id)
        sequence = self.waiting.pop(request_id, None)
        if sequence is not None:
            self.sharing.lost(sequence)
            self.frees.append(request_id)
        return sequence

    def drop(self, request_id: int) -> None:
        """Free a held cache."""
        if self.sharing.drop(request_id):
            self.frees.append(request_id)

    # -- the next step

    def plan(self, room: int) -> Plan:
        """Decide the next step; takes slots for offers, frees and restores from their queues.

        room  messages that the arrow to the store takes now
        """
        restores = self.restores.due()
        self._start_waiting()
        self.sharing.advance(self.running, self.steps)
        turn = next_turn(tuple(self.running.values()), self.steps, self._limits.bypass_max)
        chunk, twins = self._next_chunk(turn, room)
        holds, forks = self.sharing.take()
        forked = {fork.target_id for fork in forks}  # a fork replaces what is freed or restored
        step = Step(
            holds=holds,
            forks=forks,
            frees=tuple(one for one in dict.fromkeys(self.frees) if one not in forked),
            restores=tuple(
                self.restores.planes(message)
                for message in restores
                if message.request_id not in forked
            ),
            prefills=(chunk,) if chunk is not None else (),
            decodes=tuple(sequence.next_decode() for sequence in turn.decode),
            snapshots=self.offers.planes(),
        )
        self.frees.clear()
        return Plan(step, restores, turn, chunk, twins)

    def _start_waiting(self) -> None:
        running = len(self.running)
        for _ in range(admissible(len(self.waiting), running, self._limits.sequences_max)):
            request_id, sequence = self.waiting.popitem(last=False)
            if self.restores.start(request_id) and not sequence.prefilled:
                self.frees.append(request_id)
            sequence.served_step = self.steps
            self.sharing.start(sequence, self.running.values())
            self.running[request_id] = sequence

    def _next_chunk(
        self, turn: Turn, room: int
    ) -> tuple[PrefillChunk | None, tuple[Sequence, ...]]:
        leader = turn.prefill
        if leader is None:
            late = next((one for one in turn.decode if self.offers.is_late(one)), None)
            if late is not None:
                self.offers.prepare(late, range(0), room)
            return None, ()
        chunk = leader.next_chunk(self._layout.chunk_tokens)
        self.offers.prepare(leader, whole_blocks(chunk, self._layout), room)
        if chunk.sample is None:
            return chunk, ()
        twins = self.sharing.twins(leader, self.running.values())
        return replace(chunk, twins=tuple(map(twin_of, twins))), twins

    # -- what a step gave

    def apply(self, plan: Plan, result: StepResult, offers: Outbox[Offer]) -> Iterator[Tokens]:
        """Give back slots, make offers, note progress; yield the tokens that were chosen."""
        self.restores.give(plan.restores)
        self.offers.send(result.snapshot_xxh3, result.failures, offers)
        self._note_prefill(plan, result)
        for sequence in plan.turn.decode:
            sequence.decode_ms += result.decode_ms
        self.decoded_tokens += len(result.sampled)
        self.steps += 1
        for sampled in result.sampled:
            yield _tokens(self.running[sampled.sequence_id], sampled)

    def _note_prefill(self, plan: Plan, result: StepResult) -> None:
        leader = plan.turn.prefill
        if plan.chunk is None or leader is None:
            return
        leader.served_step = self.steps
        leader.prefill_ms += result.prefill_ms
        if leader.id in result.failures:
            return
        count = len(plan.chunk.token_ids) // 4
        leader.prefilled += count
        self.prefilled_tokens += count
        for twin in plan.twins:
            if twin.id not in result.failures:
                self.sharing.begin_twin(twin)

    def ended(self, result: StepResult) -> list[tuple[Sequence, Finished]]:
        """Return the sequences that end with this step; those that failed early start afresh."""
        found = []
        for request_id, problem in result.failures.items():
            if not self._starts_cold(request_id):
                sequence = self.running[request_id]
                found.append((sequence, sequence.finished("error", problem)))
        for sequence in self.running.values():
            reason = sequence.end_reason(self._end_ids)
            if reason is not None and sequence.id not in result.failures:
                found.append((sequence, sequence.finished(reason)))
        return found

    def _starts_cold(self, request_id: int) -> bool:
        """After a failure: True iff only rows that it was given were lost; it starts afresh."""
        self.frees.append(request_id)
        sequence = self.waiting.get(request_id) or self.running.get(request_id)
        if sequence is None:
            self.restores.fail(request_id)
            self.sharing.drop(request_id)
            return True
        self.restores.start(request_id)
        computed = sequence.prefilled > sequence.cached or bool(sequence.completion)
        if computed or (request_id in self.running and not sequence.cached):
            return False
        sequence.begin_with(0)
        return True

    # -- ends

    def end(self, sequence: Sequence, message: Finished) -> Held:
        """A running sequence ends; those who followed it go on from what there is."""
        del self.running[sequence.id]
        held = self.sharing.end(sequence, message.reason)
        if not held.boundaries:
            self.frees.append(sequence.id)
        older: list[Sequence] = []
        for other in self.running.values():
            if other.follows == sequence.id:
                other.follows, other.served_step = None, self.steps
                self.sharing.start(other, older)
            older.append(other)
        return held

    def free_held(self) -> None:
        """No request comes any more: free what was kept for one."""
        self.frees.extend(self.sharing.drop_all())

    def lose(self, plan: Plan) -> list[Sequence]:
        """The pinned thread is gone, and every cache with it; return all sequences, now ended."""
        self.restores.clear(plan.restores)
        self.offers.lose()
        self.sharing.drop_all()
        self.frees.clear()
        found = [*self.running.values(), *self.waiting.values()]
        self.running.clear()
        self.waiting.clear()
        return found


def _tokens(sequence: Sequence, sampled: Sampled) -> Tokens:
    sequence.completion.append(sampled.token_id)
    return Tokens(
        request_id=sequence.id,
        first_index=len(sequence.completion) - 1,
        token_ids=(sampled.token_id,),
        logits_xxh3=(sampled.logits_xxh3,) if sampled.logits_xxh3 else (),
        logprobs=(sampled.logprob,) if sampled.logprob is not None else (),
    )
