"""The model on the pinned thread: weights in, steps run.  Implements ``runtime.steps.Runner``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from millpond.codecs.messages import Tensor
from millpond.runtime.errors import ModelUnreadable, UnsupportedModel
from millpond.runtime.families.base import Family
from millpond.runtime.families.config import ModelConfig
from millpond.runtime.families.gemma3 import Gemma3
from millpond.runtime.families.gemma4 import Gemma4
from millpond.runtime.families.linear import Weights
from millpond.runtime.families.llama import Llama
from millpond.runtime.guidance import GuideError, Guides
from millpond.runtime.host_memory import is_shared
from millpond.runtime.host_transfers import Transfers
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.kv.cache import Array, LiveCaches, RowError, live_caches
from millpond.runtime.kv.forks import arrays_of, cut, forked
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.kv.passes import BatchPass, DecodePass, PrefillPass
from millpond.runtime.kv.planes import put_planes, take_planes
from millpond.runtime.model_decode import TOGETHER, InPlaceSteps
from millpond.runtime.sampling import Draw, Sampler
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
from millpond.runtime.weights import TensorBuilder
from numpy.typing import NDArray

_FAMILIES: dict[str, Callable[[ModelConfig, Weights, Any], Family]] = {
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "llama": Llama,
}
# What MLX raises for a shape, a dtype or memory that it cannot serve.
_DEVICE_ERRORS = (RowError, RuntimeError, ValueError, MemoryError)


class Model:
    """A runner over MLX; every method on the pinned thread.

    decode_batch  sequences that decode together; 1: the logits of a sequence are the same to the
                  bit whatever runs beside it, more: up to rounding
    """

    def __init__(
        self,
        identity: ModelIdentity,
        layout: KvLayout,
        decode_batch: int = 1,
        guides: Guides | None = None,
    ) -> None:
        self._identity, self._layout, self._decode_batch = identity, layout, decode_batch
        self._config = identity.config
        self._compute = getattr(mx, identity.numerics.compute_dtype)
        # mutable state, changed only in the methods of Runner
        self._builder = TensorBuilder(self._compute)
        self._family: Family | None = None
        self._in_place: InPlaceSteps | None = None
        self._under_way: list[Array] = []  # ends with the last chunk
        self._caches: dict[int, LiveCaches] = {}
        self._transfers = Transfers()
        self._sampler = Sampler(self._config.suppress_tokens, guides)

    def load_rows(self, tensor: Tensor, payload: memoryview) -> None:
        """See ``Runner.load_rows``."""
        self._builder.add(tensor, payload)

    def finish_load(self) -> None:
        """See ``Runner.finish_load``."""
        weights = self._builder.finish()
        family = _FAMILIES.get(self._config.family)
        if family is None:
            raise UnsupportedModel(
                f"architecture: found {self._config.family!r}, "
                f"supported are {', '.join(sorted(_FAMILIES))}"
            )
        try:
            self._family = family(self._config, weights, self._compute)
        except KeyError as error:
            raise ModelUnreadable(f"tensor {error}: found none, expected one") from error
        if self._family.in_place is not None:
            self._in_place = InPlaceSteps(self._family.in_place)
            self._decode_batch = min(self._decode_batch, TOGETHER)
        mx.clear_cache()  # nothing is queued: memory of what was joined goes back to the system

    def run(self, step: Step) -> StepResult:
        """See ``Runner.run``."""
        failures: dict[int, str] = {}
        clock = [time.perf_counter()]
        for hold in step.holds:
            self._hold(hold, failures)
        for fork in step.forks:
            self._fork(fork, failures)
        for sequence_id in step.frees:
            self._drop(sequence_id)
        self._restore_all(step.restores, failures)
        clock.append(time.perf_counter())
        sampled: list[Sampled] = []
        for chunk in step.prefills:
            sampled += self._prefill(chunk, failures)
        clock.append(time.perf_counter())
        for batch in _batches(step.decodes, self._decode_batch):
            sampled += self._decode(batch, failures)
        clock.append(time.perf_counter())
        digests = tuple(self._snapshot(one, failures) for one in step.snapshots)
        clock.append(time.perf_counter())
        spent = [1e3 * (after - before) for before, after in pairwise(clock)]
        return StepResult(
            sampled=tuple(sampled),
            snapshot_xxh3=digests,
            restore_ms=spent[0],
            prefill_ms=spent[1],
            decode_ms=spent[2],
            snapshot_ms=spent[3],
            failures=failures,
        )

    def close(self) -> None:
        """See ``Runner.close``."""
        self._caches.clear()
        self._transfers.close()
        self._under_way = []
        self._sampler.clear()
        self._family = self._in_place = None

    # -- sequences

    def _drop(self, sequence_id: int) -> None:
        self._caches.pop(sequence_id, None)
        self._sampler.forget(sequence_id)
        if self._in_place is not None:
            self._in_place.forget(sequence_id)

    def _fail(self, sequence_id: int, error: Exception, failures: dict[int, str]) -> None:
        self._drop(sequence_id)
        failures.setdefault(sequence_id, f"{type(error).__name__}: {error}")

    def _cache_of(self, sequence_id: int, length: int) -> LiveCaches:
        """Return the sequence's caches if every layer holds exactly ``length`` tokens."""
        caches = self._caches.get(sequence_id)
        if caches is None:
            raise RowError(f"found no live cache, expected one with {length} tokens")
        for layer, cache in caches.items():
            if cache.length != length:
                raise RowError(f"layer {layer}: found {cache.length} tokens, expected {length}")
        return caches

    # -- the parts of a step

    def _hold(self, hold: Hold, failures: dict[int, str]) -> None:
        try:
            caches = self._caches.get(hold.sequence_id)
            if caches is None:
                raise RowError(f"found no live cache, expected one to keep at {hold.tokens} tokens")
            if self._in_place is not None:
                self._in_place.forget(hold.sequence_id)
            cut(caches, hold.tokens)
            self._sampler.forget(hold.sequence_id)
        except _DEVICE_ERRORS as error:
            self._fail(hold.sequence_id, error, failures)

    def _fork(self, fork: Fork, failures: dict[int, str]) -> None:
        try:
            source = self._caches.get(fork.source_id)
            if source is None:
                raise RowError(f"found no live cache, expected one with {fork.tokens} tokens")
            self._drop(fork.target_id)
            self._caches[fork.target_id] = forked(source, fork.tokens, fork.context_tokens)
        except _DEVICE_ERRORS as error:
            self._fail(fork.target_id, error, failures)

    def _restore_all(self, restores: Sequence[RestorePlanes], failures: dict[int, str]) -> None:
        """Copy planes in; one evaluation for all of them, whose failure is theirs together."""
        for one in restores:
            self._restore(one, failures)
        touched = {one.sequence_id for one in restores} & self._caches.keys()
        try:
            mx.eval([arrays_of(self._caches[sequence_id]) for sequence_id in touched])
            self._transfers.settle()
        except _DEVICE_ERRORS as error:
            for one in restores:
                self._fail(one.sequence_id, error, failures)

    def _restore(self, one: RestorePlanes, failures: dict[int, str]) -> None:
        if one.starts_over:
            self._drop(one.sequence_id)
            failures.pop(one.sequence_id, None)
        if one.sequence_id in failures:
            return
        try:
            if one.sequence_id not in self._caches:
                self._caches[one.sequence_id] = live_caches(
                    self._layout, one.context_tokens, one.boundary
                )
            put_planes(self._layout, one, self._caches[one.sequence_id], self._transfers)
        except _DEVICE_ERRORS as error:
            self._fail(one.sequence_id, error, failures)

    def _prefill(self, chunk: PrefillChunk, failures: dict[int, str]) -> list[Sampled]:
        if chunk.sequence_id in failures:
            return []
        try:
            ids = self._ids(np.frombuffer(chunk.token_ids, dtype="<u4"))
            if chunk.first_token == 0:
                self._drop(chunk.sequence_id)
                self._caches[chunk.sequence_id] = live_caches(self._layout, chunk.context_tokens)
            caches = self._cache_of(chunk.sequence_id, chunk.first_token)
            hidden = self._ready.forward(ids, PrefillPass(caches), chunk.first_token)
            if chunk.sample is None:
                self._begin(arrays_of(caches))
                return []
            logits = self._ready.logits(hidden[-1:])[0]
            draw = Draw(chunk.sequence_id, chunk.sample, 0, chunk.prompt)
            first = self._sampler.sample(draw, logits, arrays_of(caches))
        except _DEVICE_ERRORS as error:
            self._fail(chunk.sequence_id, error, failures)
            return []
        return [first, *self._twins(chunk, logits, failures)]

    def _begin(self, rows: list[Array]) -> None:
        """Wait for a chunk's rows on a CPU; elsewhere for those of the chunk before it."""
        if is_shared():
            mx.eval(rows)
            return
        mark = rows[-1].max()  # of the last layer; the rows themselves must be free to be extended
        mx.async_eval(rows, mark)  # type: ignore[no-untyped-call]
        mx.eval(self._under_way)
        self._under_way = [mark]

    def _twins(
        self, chunk: PrefillChunk, logits: Array, failures: dict[int, str]
    ) -> Iterator[Sampled]:
        """Begin the other sequences of a prompt where its last chunk ended."""
        caches = self._caches[chunk.sequence_id]
        tokens = chunk.first_token + len(chunk.token_ids) // 4
        for twin in chunk.twins:
            try:
                self._drop(twin.sequence_id)
                self._caches[twin.sequence_id] = forked(caches, tokens, twin.context_tokens)
                draw = Draw(twin.sequence_id, twin.sample, 0, chunk.prompt)
                yield self._sampler.sample(draw, logits, [])
            except _DEVICE_ERRORS as error:
                self._fail(twin.sequence_id, error, failures)

    def _decode(self, tokens: Sequence[DecodeToken], failures: dict[int, str]) -> list[Sampled]:
        """Run one token of each sequence together; a device error fails them all."""
        ready: dict[int, tuple[DecodeToken, LiveCaches]] = {}
        for token in tokens:
            if token.sequence_id not in failures:
                try:
                    if token.sequence_id in ready:
                        raise RowError("found two tokens of it in a step, expected one")
                    self._ids(np.array([token.token_id], dtype=np.int64))
                    caches = self._cache_of(token.sequence_id, token.position)
                    ready[token.sequence_id] = (token, caches)
                except RowError as error:
                    ready.pop(token.sequence_id, None)
                    self._fail(token.sequence_id, error, failures)
        try:
            return self._decode_ready(list(ready.values()), failures) if ready else []
        except _DEVICE_ERRORS as error:
            for sequence_id in ready:
                self._fail(sequence_id, error, failures)
            return []

    def _decode_ready(
        self, ready: Sequence[tuple[DecodeToken, LiveCaches]], failures: dict[int, str]
    ) -> list[Sampled]:
        if self._in_place is not None:
            return self._decode_in_place(self._in_place, ready, failures)
        ids = mx.array([token.token_id for token, _ in ready], dtype=mx.uint32)
        token, caches = ready[0]
        if len(ready) == 1:
            hidden = self._ready.forward(ids, DecodePass(caches), token.position)
        else:
            positions = mx.array([token.position for token, _ in ready], dtype=mx.int32)
            batch = BatchPass([caches for _, caches in ready])
            hidden = self._ready.forward(ids, batch, positions)
        logits = self._ready.logits(hidden)
        arrays = [a for _, caches in ready for a in arrays_of(caches)]
        return self._sampled(ready, logits, arrays, failures)

    def _decode_in_place(
        self,
        steps: InPlaceSteps,
        ready: Sequence[tuple[DecodeToken, LiveCaches]],
        failures: dict[int, str],
    ) -> list[Sampled]:
        logits, best = steps.run(ready)
        if not all(self._sampler.takes_best(token.sample) for token, _ in ready):
            return self._sampled(ready, logits, [], failures)
        return [
            self._sampler.take_best(
                Draw(token.sequence_id, token.sample, token.step), logits[index], token_id
            )
            for index, ((token, _), token_id) in enumerate(
                zip(ready, steps.chosen(ready, best), strict=True)
            )
        ]

    def _sampled(
        self,
        ready: Sequence[tuple[DecodeToken, LiveCaches]],
        logits: Array,
        arrays: list[Array],
        failures: dict[int, str],
    ) -> list[Sampled]:
        """Choose a token for each row of logits, and evaluate ``arrays`` along with the first."""
        sampled = []
        for (token, _), row in zip(ready, logits, strict=True):
            draw = Draw(token.sequence_id, token.sample, token.step)
            try:
                sampled.append(self._sampler.sample(draw, row, arrays))
            except GuideError as error:  # the others know nothing of its schema
                self._fail(token.sequence_id, error, failures)
                continue
            arrays = []  # evaluated along with the first token
        return sampled

    def _snapshot(self, one: SnapshotPlanes, failures: dict[int, str]) -> bytes:
        """Return the xxh3-128 of the planes that were copied out, empty if the sequence failed."""
        if one.sequence_id in failures:
            return b""
        try:
            caches = self._caches.get(one.sequence_id)
            if caches is None:
                raise RowError("found no live cache, expected one with a whole block")
            return take_planes(self._layout, one, caches, self._transfers)
        except _DEVICE_ERRORS as error:
            self._fail(one.sequence_id, error, failures)
            return b""

    def _ids(self, ids: NDArray[Any]) -> Array:
        """Return token ids on the device; a lookup there checks nothing."""
        vocab = self._config.vocab
        if not ids.size or ids.min() < 0 or ids.max() >= vocab:
            found = f"{ids.min()} to {ids.max()}" if ids.size else "none"
            raise RowError(f"token ids: found {found}, expected some from 0 to {vocab - 1}")
        return mx.array(ids.astype(np.uint32))

    @property
    def _ready(self) -> Family:
        if self._family is None:
            raise RuntimeError("found a step before the weights were loaded")
        return self._family


def _batches(tokens: Sequence[DecodeToken], size: int) -> Iterator[Sequence[DecodeToken]]:
    """Cut into runs of at most ``size``."""
    for first in range(0, len(tokens), size):
        yield tokens[first : first + size]
