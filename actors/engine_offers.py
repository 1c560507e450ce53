"""The engine's offers: slots for the blocks of the chunk that runs next, and their Snapshots.

Invariants

(I1) A slot taken in ``prepare`` is sent, given back or lost before the next ``prepare``.
(I2) Blocks of a full group are offered in chain order, before the sliding ones of the same tokens;
     after one was refused the request offers no more of them.  A refused sliding block loses one
     boundary only.
(I3) A block is offered whole: all its parts have slots and room in the arrow, or none is taken.
(I4) A sequence that began with a held cache offers the blocks of full groups in chain order, from
     the first that the disk lacks on; what has no room now is offered with a later step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from millpond.codecs.messages import Offer, Snapshot
from millpond.runtime.channels import Outbox
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.sequence import Sequence
from millpond.runtime.staging import Lease, StagingPool
from millpond.runtime.steps import SnapshotPlanes


@dataclass(frozen=True, slots=True)
class _Part:
    """One staged part of a block, before it is filled."""

    sequence: Sequence
    group: LayerGroup
    block: int
    first_plane: int
    planes: int
    last: bool
    lease: Lease


class Offers:
    """Used by the engine only, on the event loop."""

    def __init__(self, layout: KvLayout, pool: StagingPool) -> None:
        self._layout, self._pool = layout, pool
        # mutable state, changed only in prepare, send and lose
        self._parts: list[_Part] = []
        self.offered = self.refused = 0

    def prepare(self, sequence: Sequence, blocks: range, room: int) -> None:
        """Take slots for the blocks that the next chunk of ``sequence`` fills.

        room  messages that the arrow to the store takes now; only this actor sends there
        """
        assert not self._parts, "the last step's offers were neither sent nor lost"
        full, sliding = self._layout.full_groups, self._layout.sliding_groups
        if sequence.offers_late:
            self._prepare_late(sequence, blocks, room)
            full = ()
        for block in blocks:
            for group in (*full, *sliding):
                if sequence.wants(group, block) and not self._take(sequence, group, block, room):
                    self._refuse(sequence, group)

    def is_late(self, sequence: Sequence) -> bool:
        """True iff blocks of full groups are still to be offered from the live cache (I4)."""
        return sequence.offers_late and bool(self._late_blocks(sequence, range(0)))

    def _late_blocks(self, sequence: Sequence, blocks: range) -> range:
        """Return those that may go with the next step: one more than a chunk has, at most."""
        per_chunk = self._layout.chunk_tokens // self._layout.block_tokens
        done = sequence.prefilled // self._layout.chunk_tokens * per_chunk
        first = max(sequence.late_block, sequence.admit.full_from_block)
        return range(first, min(max(done, blocks.stop), first + per_chunk + 1))

    def _prepare_late(self, sequence: Sequence, blocks: range, room: int) -> None:
        for block in self._late_blocks(sequence, blocks):
            before = len(self._parts)
            if not all(self._take(sequence, one, block, room) for one in self._layout.full_groups):
                for part in self._parts[before:]:
                    self._pool.give(part.lease.slot, part.lease.lease)
                del self._parts[before:]
                return
            sequence.late_block = block + 1

    def planes(self) -> tuple[SnapshotPlanes, ...]:
        """Return what the step copies out."""
        tokens = self._layout.block_tokens
        return tuple(
            SnapshotPlanes(
                sequence_id=part.sequence.id,
                group=part.group.index,
                first_token=part.block * tokens,
                tokens=tokens,
                first_plane=part.first_plane,
                planes=part.planes,
                payload=part.lease.buffer,
            )
            for part in self._parts
        )

    def send(
        self, digests: Ordered[bytes], failures: Mapping[int, str], offers: Outbox[Offer]
    ) -> None:
        """Offer what the step copied; give back the slots of a sequence that failed."""
        parts, self._parts = self._parts, []
        if parts and parts[0].sequence.id in failures:
            for part in parts:
                self._pool.give(part.lease.slot, part.lease.lease)
            return
        for part, digest in zip(parts, digests, strict=True):
            offers.send_nowait(self._snapshot(part, digest))
            if part.last:
                part.sequence.offered += 1
                self.offered += 1

    def lose(self) -> None:
        """The pinned thread may still write to the slots: set them aside for good."""
        for part in self._parts:
            self._pool.lose(part.lease.slot, part.lease.lease)
        self._parts = []

    def _take(self, sequence: Sequence, group: LayerGroup, block: int, room: int) -> bool:
        tokens = self._layout.block_tokens
        cuts = group.parts(tokens, self._pool.slot_bytes)
        if len(self._parts) + len(cuts) > room or len(cuts) > self._pool.available():
            return False
        for first_plane, planes in cuts:
            lease = self._pool.try_lend(planes * group.plane_bytes(tokens))
            assert lease is not None, "available() counted this slot"
            last = first_plane + planes == group.planes
            part = _Part(sequence, group, block, first_plane, planes, last, lease)
            self._parts.append(part)
        return True

    def _refuse(self, sequence: Sequence, group: LayerGroup) -> None:
        self.refused += 1
        sequence.refused += 1
        if group.is_full:
            sequence.offering = False

    def _snapshot(self, part: _Part, digest: bytes) -> Snapshot:
        admit, block, tokens = part.sequence.admit, part.block, self._layout.block_tokens
        return Snapshot(
            request_id=part.sequence.id,
            group=part.group.index,
            first_token=block * tokens,
            chain_hash=admit.chain[block],
            parent=admit.chain[block - 1] if block else admit.root,
            token_ids=admit.token_ids[4 * block * tokens : 4 * (block + 1) * tokens],
            first_plane=part.first_plane,
            planes=part.planes,
            last=part.last,
            slot=part.lease.slot,
            lease=part.lease.lease,
            payload_bytes=len(part.lease.buffer),
            payload_xxh3=digest,
        )
