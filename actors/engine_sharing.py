"""The engine's live caches beyond their own sequence: held for the next turn, forked, followed.

Invariants

(I1) A held cache stays until the store drops it, the engine ends, or its hold failed.
(I2) A fork is queued while its source has the rows, and runs before anything else of the next step,
     so a Drop or an end that comes meanwhile does not take them away.
(I3) A sequence follows an older one only, so no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from millpond.codecs.messages import Held
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.sequence import Sequence
from millpond.runtime.sharing import best_source, boundaries
from millpond.runtime.steps import Fork, Hold, Twin


class Sharing:
    """Used by the engine only, on the event loop."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        # mutable state, changed only in the methods below
        self._held: dict[int, Sequence] = {}
        self._holds: list[Hold] = []
        self._forks: list[Fork] = []
        self.shared_tokens = 0

    def __len__(self) -> int:
        """Count of held caches."""
        return len(self._held)

    def admit(self, sequence: Sequence) -> None:
        """Fork the held cache that the store named; without it the sequence begins cold."""
        held_id, tokens = sequence.admit.held_id, sequence.admit.prefix_tokens
        if held_id is None:
            return
        sequence.begin_with(0)
        found = self._held.get(held_id)
        if found is None or tokens not in boundaries(found, self._layout):
            return
        if found.admit.token_ids[: 4 * tokens] == sequence.admit.token_ids[: 4 * tokens]:
            self._fork(found, sequence, tokens)

    def start(self, sequence: Sequence, older: Iterable[Sequence]) -> None:
        """The sequence runs from now on: begin with rows that are there, or will be.

        older  the sequences that began to run before it, oldest first
        """
        running = list(older)
        leader = next((one for one in running if one.choice_of == sequence.choice_of), None)
        if leader is not None and leader.is_prefilling:
            sequence.follows, sequence.follows_tokens = leader.id, sequence.prompt_tokens
            return
        source = best_source(sequence, [*running, *self._held.values()], self._layout)
        if source is None:
            return
        if source.is_there:
            self._fork(source.sequence, sequence, source.tokens)
        else:
            sequence.follows, sequence.follows_tokens = source.sequence.id, source.tokens

    def advance(self, running: dict[int, Sequence], step: int) -> None:
        """Fork for every follower whose leader has the rows by now."""
        for sequence in running.values():
            if sequence.follows is not None and not _is_twin(sequence):
                leader = running[sequence.follows]
                if leader.prefilled >= sequence.follows_tokens:
                    self._fork(leader, sequence, sequence.follows_tokens)
                    sequence.follows, sequence.served_step = None, step

    def twins(self, leader: Sequence, running: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """Return the sequences that begin where the leader's last chunk ends."""
        return tuple(one for one in running if one.follows == leader.id and _is_twin(one))

    def begin_twin(self, twin: Sequence) -> None:
        """The leader's last chunk ran, and the twin has its first token."""
        twin.follows = None
        twin.begin_with(twin.prompt_tokens)
        self.shared_tokens += twin.prompt_tokens

    def end(self, sequence: Sequence, reason: str) -> Held:
        """The sequence ended: keep its cache if it can serve others, say so."""
        sequence.has_ended = True
        found = boundaries(sequence, self._layout)
        pending = any(fork.target_id == sequence.id for fork in self._forks)
        if not found or pending or reason == "error" or not sequence.admit.shares:
            self.lost(sequence)
            return Held(request_id=sequence.id)
        self._held[sequence.id] = sequence
        self._holds.append(Hold(sequence.id, found[-1]))
        return Held(request_id=sequence.id, boundaries=found)

    def drop(self, request_id: int) -> bool:
        """Forget a held cache; True iff there is one to free."""
        return self._held.pop(request_id, None) is not None

    def drop_all(self) -> tuple[int, ...]:
        """Forget every held cache; return whose they are."""
        found = tuple(self._held)
        self._held.clear()
        return found

    def lost(self, sequence: Sequence) -> None:
        """What a sequence was given, or kept, is gone."""
        self._held.pop(sequence.id, None)
        self._forks = [fork for fork in self._forks if fork.target_id != sequence.id]

    def take(self) -> tuple[tuple[Hold, ...], tuple[Fork, ...]]:
        """Return what the next step does first."""
        holds, forks = tuple(self._holds), tuple(self._forks)
        self._holds.clear()
        self._forks.clear()
        return holds, forks

    def _fork(self, source: Sequence, target: Sequence, tokens: int) -> None:
        target.begin_with(tokens)
        self.shared_tokens += tokens
        self._forks.append(Fork(source.id, target.id, tokens, target.context))


def _is_twin(sequence: Sequence) -> bool:
    return sequence.follows_tokens == sequence.prompt_tokens


def twin_of(sequence: Sequence) -> Twin:
    """Return what a leader's last chunk does for a twin."""
    return Twin(sequence.id, sequence.admit.sampling, sequence.context)
