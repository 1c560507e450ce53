"""What a caller gets back: completions, their usage, timings and reports.  Plain, frozen data."""

from __future__ import annotations

import msgspec
from millpond.codecs.choices import TokenLogprob
from millpond.codecs.messages import (
    FinishReason,
    RestoreReport,
)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; ``cached_tokens`` are prompt tokens whose K and V were not computed."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one request; ``ttft_ms`` runs from submission to the first id."""

    load_ms: float = 0.0
    ttft_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request.

    text           completion text, without prompt, control tokens or stop string
    token_ids      the completion's ids, the terminating one included and counted
    finish_reason  ``stop`` or ``length``
    restore        blocks and bytes read from disk, misses by reason
    shared_tokens  cached tokens that came from another live cache, not from the disk
    offered, refused  blocks offered to the spill store, and not offered for want of room
    logits_xxh3    digest of each step's logits, where asked for
    logprobs       of each token, where asked for
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    restore: RestoreReport
    shared_tokens: int = 0
    offered: int = 0
    refused: int = 0
    logits_xxh3: tuple[bytes, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class StreamedToken(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream.

    token_id  the id
    text      text that became whole with it; may be empty, never half a character
    index     place within the completion
    logprob   where it was asked for
    """

    token_id: int
    text: str
    index: int
    logprob: TokenLogprob | None = None
