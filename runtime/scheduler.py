"""What runs next.  Pure: the engine asks, runs the answer on the pinned thread, and applies it.

Policy: every step decodes one token of each running sequence and prefills at most one chunk, of the
sequence that was admitted first.  So between two tokens of a running answer lies at most one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from millpond.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """Which sequences take part in the next step.

    prefill  prefills its next chunk; None if nobody has one
    decode   each decodes one token
    """

    prefill: Sequence | None
    decode: tuple[Sequence, ...]


def next_turn(running: Ordered[Sequence]) -> Turn:
    """Choose from the running sequences, oldest first."""
    prefill = next((sequence for sequence in running if sequence.is_prefilling), None)
    decode = tuple(sequence for sequence in running if not sequence.is_prefilling)
    return Turn(prefill, decode)


def admissible(waiting: int, running: int, sequences_max: int) -> int:
    """Return how many waiting sequences may start now."""
    return max(0, min(waiting, sequences_max - running))
