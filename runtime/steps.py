"""What the engine asks of the pinned thread, as plain data, and the port that answers.

The engine actor plans a ``Step`` on the event loop; a ``Runner`` executes it in one hop.  The real
runner is ``runtime.model``; ``runtime.testing`` has a fake one.  No MLX type passes this border.

Order inside a step: holds, forks, frees, restores, prefills, decodes, snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from millpond.codecs.choices import SamplingParams, TokenLogprob
from millpond.codecs.messages import Tensor


@dataclass(frozen=True, slots=True)
class RestorePlanes:
    """Copy verified planes of one block into a sequence's live cache, made if there is none.

    first_token, tokens  the block's token range; tokens is block_tokens
    first_plane, planes  plane p < L is K, p >= L is V of layer ``p % L`` of the group
    payload              planes one after another, each (kv_heads, tokens, head_dim), logical order
    starts_over          drop the sequence's cache first
    context_tokens       tokens that the sequence may reach; sizes a cache made here
    boundary             tokens that are restored in all: room that a cache made here has at once
    """

    sequence_id: int
    group: int
    first_token: int
    tokens: int
    first_plane: int
    planes: int
    payload: memoryview
    starts_over: bool
    context_tokens: int
    boundary: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """A sequence ended: cut its live cache to a grid boundary and keep it, for forks.

    tokens  a boundary that a fork could have; see ``Fork``
    """

    sequence_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Give a sequence a live cache of its own with the first rows of another one's.

    tokens          rows to copy: what the source holds before it decodes, the beginning of the
                    last chunk that it ran, or what it was held at; without sliding groups anything
                    up to what it holds.  Any cache that the target has is replaced
    context_tokens  tokens that the target may reach
    """

    source_id: int
    target_id: int
    tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Twin:
    """Another sequence of the same prompt, which begins where its last chunk ends.

    It gets a fork of the cache, and its own token 0 of the same logits.
    """

    sequence_id: int
    sample: SamplingParams
    context_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run the forward pass over known tokens ``[first_token, first_token + n)``.

    token_ids       little-endian u32, the n tokens
    first_token     tokens whose rows must be in the cache; 0 starts afresh
    sample          choose token 0 of the completion from the last position's logits, or None
    context_tokens  tokens that the sequence may reach; sizes a cache made here
    prompt          the whole prompt, packed, where a repetition penalty looks at it; else empty
    twins           of a last chunk; they fail with it
    """

    sequence_id: int
    first_token: int
    token_ids: bytes
    sample: SamplingParams | None
    context_tokens: int
    prompt: bytes = b""
    twins: tuple[Twin, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeToken:
    """Run the forward pass over one token at ``position`` and choose the next one.

    step  index within the completion of the token to be chosen, from 1 on
    """

    sequence_id: int
    position: int
    token_id: int
    sample: SamplingParams
    step: int


@dataclass(frozen=True, slots=True)
class SnapshotPlanes:
    """Copy planes of one full block out of a live cache; fields as in RestorePlanes.

    payload  writable, exactly the planes' size
    """

    sequence_id: int
    group: int
    first_token: int
    tokens: int
    first_plane: int
    planes: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the pinned thread."""

    frees: tuple[int, ...] = ()
    restores: tuple[RestorePlanes, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[DecodeToken, ...] = ()
    snapshots: tuple[SnapshotPlanes, ...] = ()
    holds: tuple[Hold, ...] = ()
    forks: tuple[Fork, ...] = ()

    def __bool__(self) -> bool:
        """True iff there is anything to do."""
        parts = (self.frees, self.restores, self.prefills, self.decodes, self.snapshots)
        return any((*parts, self.holds, self.forks))


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token.

    logits_xxh3  xxh3-128 of the float32 logits, or empty
    logprob      where it was asked for
    """

    sequence_id: int
    token_id: int
    logits_xxh3: bytes = b""
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    sampled         tokens of finished prefills, each before those of its twins, then of decodes, in
                    the order of the step
    snapshot_xxh3   xxh3-128 of each snapshot's payload, in order
    prefill_ms, decode_ms, snapshot_ms, restore_ms  time spent, device work included
    failures        sequence id → message; that sequence's cache is gone, the others are whole
    """

    sampled: tuple[Sampled, ...] = ()
    snapshot_xxh3: tuple[bytes, ...] = ()
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    snapshot_ms: float = 0.0
    restore_ms: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)


class Runner(Protocol):
    """All that runs on the pinned thread; each method is called there and nowhere else."""

    def load_rows(self, tensor: Tensor, payload: memoryview) -> None:
        """Copy rows of a weight tensor to the device; ``payload`` may be reused on return."""

    def finish_load(self) -> None:
        """Build the model once every tensor came; raises ModelError if one is missing or odd."""

    def run(self, step: Step) -> StepResult:
        """Execute one step."""

    def close(self) -> None:
        """Drop every device object; nothing is called after it."""
