"""Logits to a token id.  Pinned thread only.

A draw's random key is a function of the request's seed, its choice and the step alone, so the same
request gives the same text whatever else runs.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from millpond.codecs.choices import SamplingParams, TokenLogprob
from millpond.runtime.guidance import Guide, GuideError, Guides
from millpond.runtime.steps import Sampled

_LOGIT_MAX = 3e38  # just inside float32: the difference of two infinities would be no number
_TEMPERATURE_MIN = 1e-30  # in float32 much smaller ones are zero; the best id wins long before


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose.

    step    its index within the completion
    prompt  the packed prompt at step 0, where a penalty looks at it; else empty
    """

    sequence_id: int
    sampling: SamplingParams
    step: int
    prompt: bytes = b""


@dataclass(slots=True)
class History:
    """What penalties look at.

    prompt      distinct prompt ids, where a repetition penalty asked for them
    completion  how often each id was chosen so far
    """

    prompt: frozenset[int] = frozenset()
    completion: Counter[int] = field(default_factory=Counter)


class Sampler:
    """Seeds and histories of the live sequences."""

    def __init__(self, suppressed: tuple[int, ...], guides: Guides | None = None) -> None:
        """Begin with none.

        suppressed  ids that are never chosen
        guides      of this model's tokenizer; None: no answer can be held to a form
        """
        self._suppressed = mx.array(suppressed, dtype=mx.uint32) if suppressed else None
        self._guides = guides
        # mutable state, changed only in the methods
        self._seeds: dict[int, int] = {}
        self._histories: dict[int, History] = {}
        self._guided: dict[int, Guide] = {}

    def sample(self, draw: Draw, logits: Any, arrays: list[Any]) -> Sampled:
        """Choose a token from raw float32 logits (V,), and evaluate ``arrays`` along with it.

        Raises GuideError if the request's form allows no token.
        """
        sampling, raw = draw.sampling, logits
        history = self._history(draw)
        logits = adjusted(logits, sampling, history)
        if self._suppressed is not None:
            logits = _put(logits, self._suppressed, mx.array(-mx.inf))
        guide = self._guide_of(draw)
        if guide is not None:
            allowed = guide.allowed(logits.shape[0])
            logits = mx.where(mx.array(allowed), logits, -mx.inf)
        chosen = choose(logits, sampling, self._seed_of(draw), draw.step)
        mx.eval(chosen, raw, logits, arrays)
        token_id = int(chosen.item())
        history.completion[token_id] += 1
        if guide is not None:
            guide.take(token_id)
        count = sampling.logprobs
        return Sampled(
            draw.sequence_id,
            token_id,
            xxhash.xxh3_128_digest(memoryview(raw)) if sampling.digest_logits else b"",
            None if count is None else logprob_of(logits, token_id, count),
        )

    def takes_best(self, sampling: SamplingParams) -> bool:
        """True if the token is the one with the best raw logit."""
        return (
            sampling.temperature == 0.0
            and sampling.repetition_penalty == 1.0
            and not (sampling.presence_penalty or sampling.frequency_penalty)
            and not (sampling.logit_bias or sampling.json_schema or sampling.grammar)
            and self._suppressed is None
        )

    def take_best(self, draw: Draw, logits: Any, token_id: int) -> Sampled:
        """Return a token chosen where ``takes_best``; raw float32 logits (V,), not evaluated."""
        self._history(draw).completion[token_id] += 1
        sampling, count = draw.sampling, draw.sampling.logprobs
        digest = b""
        if sampling.digest_logits or count is not None:
            mx.eval(logits)
        if sampling.digest_logits:
            digest = xxhash.xxh3_128_digest(memoryview(logits))
        found = None if count is None else logprob_of(logits, token_id, count)
        return Sampled(draw.sequence_id, token_id, digest, found)

    def forget(self, sequence_id: int) -> None:
        """Drop what is known of a sequence."""
        self._seeds.pop(sequence_id, None)
        self._histories.pop(sequence_id, None)
        self._guided.pop(sequence_id, None)

    def clear(self) -> None:
        """Drop everything."""
        self._seeds.clear()
        self._histories.clear()
        self._guided.clear()

    def _history(self, draw: Draw) -> History:
        if draw.step == 0:
            prompt = np.unique(np.frombuffer(draw.prompt, dtype="<u4")).tolist()
            self._histories[draw.sequence_id] = History(frozenset(prompt))
        return self._histories.setdefault(draw.sequence_id, History())

    def _guide_of(self, draw: Draw) -> Guide | None:
        form = draw.sampling.form
        if form is None:
            return None
        if draw.step == 0:
            if self._guides is None:
                raise GuideError(f"{form.kind}: found no guides")
            self._guided[draw.sequence_id] = self._guides.start(form)
        return self._guided[draw.sequence_id]

    def _seed_of(self, draw: Draw) -> int:
        if draw.sampling.seed is not None:
            return draw.sampling.seed
        return self._seeds.setdefault(draw.sequence_id, secrets.randbits(63))


def adjusted(logits: Any, sampling: SamplingParams, history: History) -> Any:
    """Return float32 logits (V,) after repetition, presence and frequency penalty, and bias."""
    if sampling.repetition_penalty != 1.0:
        seen = sorted(i for i in history.prompt | set(history.completion) if i < logits.shape[0])
        if seen:
            index = mx.array(seen, dtype=mx.uint32)
            found, penalty = logits[index], sampling.repetition_penalty
            logits = _put(logits, index, mx.where(found > 0, found / penalty, found * penalty))
    if history.completion and (sampling.presence_penalty or sampling.frequency_penalty):
        chosen = sorted(history.completion)
        counts = mx.array([history.completion[i] for i in chosen], dtype=mx.float32)
        index = mx.array(chosen, dtype=mx.uint32)
        lost = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits = _put(logits, index, logits[index] - lost)
    bias = {i: value for i, value in sampling.logit_bias.items() if i < logits.shape[0]}
    if bias:
        index = mx.array(sorted(bias), dtype=mx.uint32)
        added = mx.array([bias[i] for i in sorted(bias)], dtype=mx.float32)
        logits = _put(logits, index, logits[index] + added)
    return logits


def _put(logits: Any, index: Any, values: Any) -> Any:
    copy = mx.array(logits)
    copy[index] = values
    return copy


def choose(logits: Any, sampling: SamplingParams, seed: int, step: int) -> Any:
    """Return a lazy scalar id chosen from float32 logits (V,); temperature 0 takes the best.

    The filters apply in the usual order: temperature, top-k, top-p, min-p.
    """
    if sampling.temperature == 0.0:
        return mx.argmax(logits)
    # From the best one down: however small the temperature is, nothing overflows but to -inf.
    finite = mx.minimum(logits, _LOGIT_MAX)
    scaled = (finite - mx.max(finite)) / max(sampling.temperature, _TEMPERATURE_MIN)
    order = mx.argsort(-scaled)
    ranked = scaled[order]
    shares = mx.softmax(ranked)
    rank = mx.arange(ranked.shape[0])
    keep = rank < min(sampling.top_k or ranked.shape[0], ranked.shape[0])
    keep &= (mx.cumsum(shares) - shares) < sampling.top_p
    keep &= shares >= sampling.min_p * shares[0]
    keep |= rank == 0  # rounding must never leave nothing to choose from
    drawn = mx.random.categorical(
        mx.where(keep, ranked, -mx.inf), key=_key(seed, sampling.choice, step)
    )
    return order[drawn]


def logprob_of(logits: Any, token_id: int, count: int) -> TokenLogprob:
    """Return the log-probability of a chosen id and of the ``count`` best that may be chosen."""
    values: Any = np.minimum(np.array(logits, dtype=np.float64), _LOGIT_MAX)
    top = float(values.max())
    values -= top + np.log(np.exp(values - top).sum())
    best: Any = np.argpartition(-values, min(count, len(values) - 1))[:count] if count else []
    found = [(int(i), float(values[i])) for i in best if np.isfinite(values[i])]
    ranked = sorted(found, key=lambda one: (-one[1], one[0]))
    return TokenLogprob(logprob=float(values[token_id]), top=tuple(ranked))


def _key(seed: int, choice: int, step: int) -> Any:
    """Mix seed, choice and step into a random key.

    By the 64-bit finaliser of splitmix64 (Steele et al. 2014); choices are 2^32 steps apart.
    """
    mask = 2**64 - 1
    mixed = (seed + (step + 1 + (choice << 32)) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mx.random.key((mixed ^ (mixed >> 31)) & mask)
