"""Logits to a token id.  Pinned thread only.

A draw's random key is a function of the request's seed and the step alone, so the same request
gives the same text whatever else runs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from millpond.codecs.messages import SamplingParams


def choose(logits: Any, sampling: SamplingParams, seed: int, step: int) -> Any:
    """Return a lazy scalar id chosen from float32 logits (V,); temperature 0 takes the best.

    The filters apply in the usual order: temperature, top-k, top-p, min-p.
    """
    if sampling.temperature == 0.0:
        return mx.argmax(logits)
    scaled = logits / sampling.temperature
    order = mx.argsort(-scaled)
    ranked = scaled[order]
    shares = mx.softmax(ranked)
    rank = mx.arange(ranked.shape[0])
    keep = rank < (sampling.top_k or ranked.shape[0])
    keep &= (mx.cumsum(shares) - shares) < sampling.top_p
    keep &= shares >= sampling.min_p * shares[0]
    keep |= rank == 0  # rounding must never leave nothing to choose from
    drawn = mx.random.categorical(mx.where(keep, ranked, -mx.inf), key=_key(seed, step))
    return order[drawn]


def _key(seed: int, step: int) -> Any:
    """Mix seed and step into a random key: 64-bit finaliser of splitmix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    mixed = (seed + (step + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mx.random.key((mixed ^ (mixed >> 31)) & mask)
