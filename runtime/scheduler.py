"""What runs next.  Pure: the engine asks, runs the answer on the pinned thread, and applies it.

Every step decodes one token of each running sequence and prefills at most one chunk.  So between
two tokens of a running answer lie at most one chunk and one decode of ``sequences_max`` tokens, and
the copies of that step: restored planes (``restore_slots`` at most), forks of sequences that begin,
caches cut as they are held, snapshots of the chunk's blocks.

Of the sequences that have a chunk to prefill the one of the highest priority goes first, among
those the one with the fewest chunks left.  Who waited for ``bypass_max`` steps goes before: a
prompt of n chunks is read within n · (bypass_max + sequences_max) steps, whatever else comes.
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


def next_turn(running: Ordered[Sequence], step: int, bypass_max: int) -> Turn:
    """Choose from the running sequences, oldest first.

    step  count of the steps before this one
    """
    reading = [one for one in running if one.is_prefilling and one.follows is None]
    decode = tuple(one for one in running if not one.is_prefilling)
    late = [one for one in reading if step - one.served_step > bypass_max]
    if late:
        return Turn(min(late, key=lambda one: one.served_step), decode)
    if not reading:
        return Turn(None, decode)
    wanted = _wanted_priorities(running)
    return Turn(min(reading, key=lambda one: (-wanted[one.id], one.tokens_left)), decode)


def admissible(waiting: int, running: int, sequences_max: int) -> int:
    """Return how many waiting sequences may start now."""
    return max(0, min(waiting, sequences_max - running))


def _wanted_priorities(running: Ordered[Sequence]) -> dict[int, int]:
    """Return each sequence's priority, or that of the most urgent one that follows it."""
    wanted = {one.id: one.admit.priority for one in running}
    for one in reversed(running):  # a sequence follows an older one
        if one.follows in wanted:
            wanted[one.follows] = max(wanted[one.follows], wanted[one.id])
    return wanted
