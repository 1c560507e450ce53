"""Which live cache a sequence can begin with instead of computing its prefix again.  Pure.

A sequence shares whole chunks of the grid with another one if their chain hashes say so, and the
token ids agree.  It takes rows that are there now, or follows a sequence that will have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sequence's prefix comes from.

    tokens    how long it is
    is_there  False: ``sequence`` has not got that far yet
    """

    sequence: Sequence
    tokens: int
    is_there: bool


def best_source(sequence: Sequence, others: Iterable[Sequence], layout: KvLayout) -> Source | None:
    """Return the source of the longest prefix beyond what the sequence has, None if there is none.

    Of equal ones the first that has the rows already, else the first.
    """
    best: Source | None = None
    for other in others:
        found = _source(sequence, other, layout)
        if found is None or found.tokens <= sequence.prefilled:
            continue
        rank = (found.tokens, found.is_there)
        if best is None or rank > (best.tokens, best.is_there):
            best = found
    return best


def _source(sequence: Sequence, other: Sequence, layout: KvLayout) -> Source | None:
    if not (sequence.admit.shares and other.admit.shares):
        return None
    limit = min(common_tokens(sequence, other, layout), layout.reuse_limit(sequence.prompt_tokens))
    if other.prefilled < limit and not other.has_ended:
        return Source(other, limit, False)
    there = [tokens for tokens in boundaries(other, layout) if tokens <= limit]
    return Source(other, there[-1], True) if there else None


def common_tokens(one: Sequence, other: Sequence, layout: KvLayout) -> int:
    """Return the longest boundary up to which two prompts, and their salts, are the same."""
    if one.admit.root != other.admit.root:
        return 0
    stride = layout.chunk_tokens // layout.block_tokens
    low, high = 0, min(len(one.admit.chain), len(other.admit.chain)) // stride
    while low < high:  # equal up to ``low`` chunks; a hash names everything before it
        middle = (low + high + 1) // 2
        if one.admit.chain[middle * stride - 1] == other.admit.chain[middle * stride - 1]:
            low = middle
        else:
            high = middle - 1
    tokens = low * layout.chunk_tokens
    is_same = one.admit.token_ids[: 4 * tokens] == other.admit.token_ids[: 4 * tokens]
    return tokens if is_same else 0


def boundaries(sequence: Sequence, layout: KvLayout) -> tuple[int, ...]:
    """Return the boundaries at which the sequence's live cache can be forked now, ascending.

    Full layers keep every row.  Sliding ones have the rows before the chunk that ran last, and
    that chunk's.
    """
    chunk, done = layout.chunk_tokens, sequence.prefilled
    if not layout.sliding_groups:
        return tuple(range(chunk, done // chunk * chunk + 1, chunk))
    found = {done} if done % chunk == 0 else set()
    if done > sequence.cached:
        found.add((done - 1) // chunk * chunk)
    return tuple(sorted(found - {0}))
