"""``FakeModel``: a ``Runner`` whose rows and tokens are hashes of everything before them.

Any row that is wrong, missing or misplaced changes the text; ``fake_rows`` says what hashes what.
A sliding group lives in a real ring, ``position % sliding_window``, and a slot that nobody wrote is
zero; a full group has a slot for each position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from millpond.codecs.choices import SamplingParams
from millpond.codecs.messages import Tensor
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.steps import (
    DecodeToken,
    Fork,
    Hold,
    PrefillChunk,
    RestorePlanes,
    Sampled,
    SnapshotPlanes,
    Step,
    StepResult,
)
from millpond.runtime.testing.fake_caches import GroupCache
from millpond.runtime.testing.fake_rows import (
    Shape,
    chosen_token,
    chunk_rows,
    chunk_state,
    last_row,
    next_digest,
)


class ModelFault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault of the model.

    step  number of the step, from 0
    kind  sequence: one sequence of the step fails, its cache is gone; restore: the same, but only
          if the step restores or forks; bug: the step raises ModelBug
    """

    step: int
    kind: str


class ModelBug(ArithmeticError):
    """What a bug on the pinned thread raises; it must end the house."""


class FakeModel:
    """Runs steps on plain bytes.

    weights  any bytes, those that ``load_rows`` brings are added; other weights, other texts
    faults   planned; ``injected`` counts those that happened, ``failed`` names the running
             sequences that they hit
    """

    def __init__(
        self, layout: KvLayout, vocab: int, weights: bytes = b"", faults: Sequence[ModelFault] = ()
    ) -> None:
        self._shape, self._vocab = Shape.of(layout), vocab
        # mutable state, changed only in load_rows, run, plan and close
        self._faults = {fault.step: fault.kind for fault in faults}
        self._weights = weights
        self.caches: dict[int, dict[int, GroupCache]] = {}
        self._contexts: dict[int, tuple[bytes, bytes]] = {}  # the decoded run's state and ids
        self.steps = 0
        self.injected: Counter[str] = Counter()
        self.failed: set[int] = set()
        self._hurt: set[int] = set()
        self.most_caches = self.most_decodes = 0
        self.left_behind: tuple[int, ...] = ()

    def plan(self, fault: ModelFault) -> None:
        """Plan another fault; steps count from now on."""
        self._faults[self.steps + fault.step] = fault.kind

    def load_rows(self, tensor: Tensor, payload: memoryview) -> None:
        """Add the bytes to the weights."""
        self._weights += bytes(payload)

    def finish_load(self) -> None:
        """There is nothing to build."""

    def close(self) -> None:
        """Note whose caches were never freed, and drop them."""
        self.left_behind = tuple(self.caches)
        self.caches.clear()

    def run(self, step: Step) -> StepResult:
        """See ``Runner.run``."""
        fault = self._faults.get(self.steps, "")
        self.steps += 1
        if fault == "bug":
            self.injected["model bug"] += 1
            raise ModelBug("a bug on the pinned thread")
        failures = self._failures(fault, step)
        for hold in step.holds:
            self._hold(hold)
        for fork in step.forks:
            if fork.target_id not in failures:
                self._fork(fork)
        for sequence_id in step.frees:
            self._drop(sequence_id)
        for restore in step.restores:
            if restore.sequence_id not in failures:
                self._restore(restore)
        sampled: list[Sampled] = []
        for chunk in step.prefills:
            if chunk.sequence_id not in failures:
                sampled += self._prefill(chunk)
        sampled += [
            self._decode(token) for token in step.decodes if token.sequence_id not in failures
        ]
        digests = [
            b"" if one.sequence_id in failures else self._snapshot(one) for one in step.snapshots
        ]
        self.most_caches = max(self.most_caches, len(self.caches))
        self.most_decodes = max(self.most_decodes, len(step.decodes))
        for sequence_id in failures:
            self._drop(sequence_id)
        return StepResult(tuple(sampled), tuple(digests), failures=failures)

    def _failures(self, fault: str, step: Step) -> dict[int, str]:
        restoring = [one.sequence_id for one in step.restores]
        restoring += [one.target_id for one in step.forks]
        running = [one.sequence_id for one in step.prefills]
        running += [one.sequence_id for one in step.decodes]
        victims = {"sequence": running, "restore": restoring}.get(fault, [])
        if not victims:
            return {}
        self.injected[f"{fault} failed"] += 1
        self._hurt.add(victims[-1])
        if fault == "sequence":
            self.failed.add(victims[-1])
        return {victims[-1]: "planned"}

    def _drop(self, sequence_id: int) -> None:
        self.caches.pop(sequence_id, None)
        self._contexts.pop(sequence_id, None)

    def _new_caches(self, context_tokens: int) -> dict[int, GroupCache]:
        layout = self._shape.layout
        return {
            group.index: GroupCache(group, layout.sliding_window, context_tokens)
            for group in layout.groups
        }

    def _hold(self, hold: Hold) -> None:
        for cache in self.caches[hold.sequence_id].values():
            cache.cut(hold.tokens)
        self._contexts.pop(hold.sequence_id, None)

    def _fork(self, fork: Fork) -> None:
        caches = self.caches[fork.source_id]
        self.caches[fork.target_id] = {
            index: cache.fork(fork.tokens, fork.context_tokens) for index, cache in caches.items()
        }

    def _restore(self, one: RestorePlanes) -> None:
        if one.starts_over:
            self._drop(one.sequence_id)
        caches = self.caches.get(one.sequence_id)
        if caches is None:
            caches = self.caches[one.sequence_id] = self._new_caches(one.context_tokens)
        group = self._shape.layout.groups[one.group]
        width = group.head_dim * group.dtype.elem_bytes
        rows = np.frombuffer(one.payload, np.uint8)
        rows = rows.reshape(one.planes, group.kv_heads, one.tokens, width)
        planes = slice(one.first_plane, one.first_plane + one.planes)
        continues = caches[one.group].restore(planes, one.first_token, rows)
        assert continues or one.sequence_id in self._hurt, "restored rows continue those before"

    def _prefill(self, chunk: PrefillChunk) -> list[Sampled]:
        who, first = chunk.sequence_id, chunk.first_token
        if first == 0:
            self._drop(who)
            self.caches[who] = self._new_caches(chunk.context_tokens)
        end = first + len(chunk.token_ids) // 4
        state = chunk_state(self._weights, range(first, end), self._seen(who, first))
        rows = chunk_rows(self._shape, state, chunk.token_ids)
        for group in self._shape.layout.groups:
            self.caches[who][group.index].prefill(first, self._shape.rows(group, rows))
        self._contexts[who] = (state, chunk.token_ids)
        if chunk.sample is None:
            return []
        sampled = [self._sample(who, end, chunk.sample)]
        for twin in chunk.twins:
            self._fork(Fork(who, twin.sequence_id, end, twin.context_tokens))
            self._contexts[twin.sequence_id] = self._contexts[who]
            sampled.append(self._sample(twin.sequence_id, end, twin.sample))
        return sampled

    def _decode(self, token: DecodeToken) -> Sampled:
        state, ids = self._contexts[token.sequence_id]
        ids += pack_tokens([token.token_id])
        row = last_row(self._shape, state, ids)
        self._put(token.sequence_id, token.position, row)
        self._contexts[token.sequence_id] = (state, ids)
        return self._sample(token.sequence_id, token.position + 1, token.sample)

    def _put(self, sequence_id: int, first: int, rows: bytes) -> None:
        caches = self.caches[sequence_id]
        for group in self._shape.layout.groups:
            caches[group.index].put(slice(None), first, self._shape.rows(group, rows))

    def _seen(self, sequence_id: int, end: int) -> list[bytes]:
        caches = self.caches[sequence_id]
        return [caches[group.index].seen(end) for group in self._shape.layout.groups]

    def _sample(self, sequence_id: int, end: int, sampling: SamplingParams) -> Sampled:
        digest = next_digest(self._seen(sequence_id, end))
        shown = digest if sampling.digest_logits else b""
        return Sampled(sequence_id, chosen_token(digest, self._vocab), shown)

    def _snapshot(self, one: SnapshotPlanes) -> bytes:
        planes = slice(one.first_plane, one.first_plane + one.planes)
        cache = self.caches[one.sequence_id][one.group]
        one.payload[:] = cache.take(planes, one.first_token, one.tokens)
        return xxhash.xxh3_128_digest(one.payload)
