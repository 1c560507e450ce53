"""``Sequence``: one admitted request inside the engine, its tokens and its progress.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.codecs.messages import Admit, Finished, FinishReason
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.steps import DecodeToken, PrefillChunk


@dataclass(slots=True)
class Sequence:
    """A request from Admit to Finished.

    admit           what the store said
    context_tokens  tokens that prompt and completion may reach
    prefilled       leading prompt tokens whose rows are in the live cache, by now
    cached          of them, those that a restore or a fork put there
    shared          of those, the ones that a fork put there
    completion      token ids chosen so far
    offering        full-attention blocks are still offered
    follows         id of the running sequence whose rows it waits for, None if it waits for none
    follows_tokens  how many of them; the whole prompt of a twin
    served_step     step at which it had its last chunk, or could have had its first
    has_ended       it runs no more; its live cache may be held
    late_block      where it began with a held cache: the block of full groups to offer next
    """

    admit: Admit
    context_tokens: int
    prefilled: int
    cached: int
    completion: list[int] = field(default_factory=list)
    offering: bool = True
    cancelled: bool = False
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    offered: int = 0
    refused: int = 0
    shared: int = 0
    follows: int | None = None
    follows_tokens: int = 0
    served_step: int = 0
    has_ended: bool = False
    late_block: int = 0

    @property
    def id(self) -> int:
        """The request id."""
        return self.admit.request_id

    @property
    def choice_of(self) -> int:
        """Id of the request that this one is another choice of; its own if of none."""
        return self.id if self.admit.twin_of is None else self.admit.twin_of

    @property
    def prompt_tokens(self) -> int:
        """Count of prompt tokens."""
        return len(self.admit.token_ids) // 4

    @property
    def is_prefilling(self) -> bool:
        """True until every prompt token went through the forward pass."""
        return self.prefilled < self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Count of prompt tokens that still have to go through the forward pass."""
        return self.prompt_tokens - self.prefilled

    @property
    def context(self) -> int:
        """Tokens that this prompt and its completion may reach."""
        wanted = self.prompt_tokens + self.admit.sampling.max_tokens
        return min(self.context_tokens, wanted)

    def begin_with(self, tokens: int) -> None:
        """A fork gave it the first rows of another sequence; 0: what it had is lost."""
        self.prefilled = self.cached = self.shared = tokens

    def next_chunk(self, chunk_tokens: int) -> PrefillChunk:
        """Return the chunk of the grid that comes next; the last one may be partial."""
        first = self.prefilled
        end = min(self.prompt_tokens, first // chunk_tokens * chunk_tokens + chunk_tokens)
        sampling = self.admit.sampling
        is_last = end == self.prompt_tokens
        return PrefillChunk(
            sequence_id=self.id,
            first_token=first,
            token_ids=self.admit.token_ids[4 * first : 4 * end],
            sample=sampling if is_last else None,
            context_tokens=self.context,
            prompt=self.admit.token_ids if is_last and sampling.repetition_penalty != 1 else b"",
        )

    def next_decode(self) -> DecodeToken:
        """Return the decode step for the token chosen last."""
        step = len(self.completion)
        return DecodeToken(
            sequence_id=self.id,
            position=self.prompt_tokens + step - 1,
            token_id=self.completion[-1],
            sample=self.admit.sampling,
            step=step,
        )

    @property
    def offers_late(self) -> bool:
        """True iff blocks of full groups may be missing on the disk that it never computes.

        They lie in its live cache, so they are offered from there, a few with each step.
        """
        return self.admit.held_id is not None and self.shared > 0 and self.admit.offers

    def wants(self, group: LayerGroup, block: int) -> bool:
        """True iff the store wants this block of this group offered."""
        if not self.admit.offers:
            return False
        if group.is_full:
            return self.offering and block >= self.admit.full_from_block
        return block in self.admit.sliding_blocks

    def end_reason(self, end_ids: frozenset[int]) -> FinishReason | None:
        """Return why the completion is over, or None if it goes on."""
        if self.cancelled:
            return "cancelled"
        if not self.completion:
            return None
        sampling = self.admit.sampling
        if self.completion[-1] in end_ids and not sampling.ignore_eos:
            return "stop"
        room = self.context_tokens - self.prompt_tokens
        if len(self.completion) >= min(sampling.max_tokens, room):
            return "length"
        return None

    def finished(self, reason: FinishReason, error: str = "", error_type: str = "") -> Finished:
        """Return the message that ends this request."""
        return Finished(
            request_id=self.id,
            reason=reason,
            error=error,
            error_type=error_type,
            cached_tokens=self.cached,
            prefilled_tokens=self.prefilled - self.cached,
            shared_tokens=self.shared,
            restored=self.admit.restored,
            prefill_ms=self.prefill_ms,
            decode_ms=self.decode_ms,
            offered=self.offered,
            refused=self.refused,
        )


def whole_blocks(chunk: PrefillChunk, layout: KvLayout) -> range:
    """Return the indexes of the blocks that a chunk fills; none unless it is a whole grid chunk."""
    tokens = len(chunk.token_ids) // 4
    if tokens != layout.chunk_tokens or chunk.first_token % layout.chunk_tokens:
        return range(0)
    first = chunk.first_token // layout.block_tokens
    return range(first, first + tokens // layout.block_tokens)
