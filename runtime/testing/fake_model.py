"""``FakeModel``: a ``Runner`` whose rows and tokens are hashes of everything before them.

Any row that is wrong, missing or misplaced changes the text; ``fake_rows`` says what hashes what.
A sliding group lives in a real ring, ``position % sliding_window``, and a slot that nobody wrote is
zero; a full group has a slot for each position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from millpond.codecs.choices import SamplingParams
from millpond.codecs.messages import Tensor
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.steps import (
    DecodeToken,
    PrefillChunk,
    RestorePlanes,
    Sampled,
    SnapshotPlanes,
    Step,
    StepResult,
)
from millpond.runtime.testing.fake_rows import (
    Bytes,
    Shape,
    chosen_token,
    chunk_rows,
    chunk_state,
    next_digest,
)


class ModelFault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault of the model.

    step  number of the step, from 0
    kind  sequence: one sequence of the step fails, its cache is gone; restore: the same, but only
          if the step restores; bug: the step raises ModelBug
    """

    step: int
    kind: str


class ModelBug(ArithmeticError):
    """What a bug on the pinned thread raises; it must end the house."""


class GroupCache:
    """The live rows of one sequence and group: (planes, kv_heads, slots, bytes of head_dim)."""

    def __init__(self, group: LayerGroup, window: int, context_tokens: int) -> None:
        self._ring = 0 if group.is_full else window
        width = group.head_dim * group.dtype.elem_bytes
        slots = self._ring or context_tokens
        # mutable state, changed only in put
        self._rows = np.zeros((group.planes, group.kv_heads, slots, width), np.uint8)
        self._chunk: tuple[int, Bytes] = (0, self._rows[:, :, :0])
        self._restored: dict[int, int] = {}  # plane → end of its restored rows

    def put(self, planes: slice, first: int, rows: Bytes) -> None:
        """Write rows of positions [first, first + tokens); a chunk stays whole for its blocks."""
        tokens = rows.shape[2]
        if planes == slice(None):
            self._chunk = (first, rows)
        kept = min(tokens, self._ring) if self._ring else tokens
        slots = self._slots(first + tokens - kept, first + tokens)
        self._rows[planes, :, slots] = rows[:, :, tokens - kept :]

    def restore(self, planes: slice, first: int, rows: Bytes) -> bool:
        """Write restored rows; False if they do not continue those that were restored before."""
        end = self._restored.get(planes.start, first if self._ring else 0)
        for plane in range(planes.start, planes.stop):
            self._restored[plane] = first + rows.shape[2]
        self.put(planes, first, rows)
        return first == end

    def seen(self, end: int) -> bytes:
        """Return what attention sees before position ``end``, in logical order."""
        slots = self._slots(max(0, end - self._ring) if self._ring else 0, end)
        return self._rows[:, :, slots].tobytes()

    def take(self, planes: slice, first: int, tokens: int) -> bytes:
        """Return the planes of a block of the last chunk, or of any block in a full group."""
        start, chunk = self._chunk
        if self._ring and start <= first and first + tokens <= start + chunk.shape[2]:
            return chunk[planes, :, first - start : first - start + tokens].tobytes()
        return self._rows[planes, :, self._slots(first, first + tokens)].tobytes()

    def _slots(self, first: int, end: int) -> Any:
        if not self._ring:
            return slice(first, end)
        if first // self._ring == (end - 1) // self._ring:
            return slice(first % self._ring, first % self._ring + end - first)
        return np.arange(first, end) % self._ring


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
        self._faults: Mapping[int, str] = {fault.step: fault.kind for fault in faults}
        # mutable state, changed only in load_rows, run and close
        self._weights = weights
        self.caches: dict[int, dict[int, GroupCache]] = {}
        self._contexts: dict[int, tuple[bytes, bytes]] = {}  # the decoded run's state and ids
        self.steps = 0
        self.injected: Counter[str] = Counter()
        self.failed: set[int] = set()
        self._hurt: set[int] = set()
        self.most_caches = 0
        self.left_behind: tuple[int, ...] = ()

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
        for sequence_id in step.frees:
            self._drop(sequence_id)
        failures = self._failures(fault, step)
        for restore in step.restores:
            if restore.sequence_id not in failures:
                self._restore(restore)
        sampled = [
            self._prefill(chunk) for chunk in step.prefills if chunk.sequence_id not in failures
        ]
        sampled += [
            self._decode(token) for token in step.decodes if token.sequence_id not in failures
        ]
        digests = [
            b"" if one.sequence_id in failures else self._snapshot(one) for one in step.snapshots
        ]
        self.most_caches = max(self.most_caches, len(self.caches))
        for sequence_id in failures:
            self._drop(sequence_id)
        chosen = tuple(one for one in sampled if one is not None)
        return StepResult(chosen, tuple(digests), failures=failures)

    def _failures(self, fault: str, step: Step) -> dict[int, str]:
        restoring = [one.sequence_id for one in step.restores]
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

    def _prefill(self, chunk: PrefillChunk) -> Sampled | None:
        if chunk.first_token == 0:
            self._drop(chunk.sequence_id)
            self.caches[chunk.sequence_id] = self._new_caches(chunk.context_tokens)
        end = chunk.first_token + len(chunk.token_ids) // 4
        seen = self._seen(chunk.sequence_id, chunk.first_token)
        state = chunk_state(self._weights, range(chunk.first_token, end), seen)
        rows = chunk_rows(self._shape, state, chunk.token_ids)
        self._put(chunk.sequence_id, chunk.first_token, rows)
        self._contexts[chunk.sequence_id] = (state, chunk.token_ids)
        if chunk.sample is None:
            return None
        return self._sample(chunk.sequence_id, end, chunk.sample)

    def _decode(self, token: DecodeToken) -> Sampled:
        state, ids = self._contexts[token.sequence_id]
        ids += pack_tokens([token.token_id])
        row = chunk_rows(self._shape, state, ids)[-self._shape.row_bytes :]
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
