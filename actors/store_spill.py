"""The store's spilling: offers in, files out.

Invariants

(I1) The slots of an offer are given back once its block is written or refused, on every path.
(I2) What is written is what the engine hashed: staged bytes are compared with their digests first.
(I3) A block is written only under the name that its parent and token ids give it, and only in the
     one shape of its group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

from millpond.actors.store_parts import StoreParts
from millpond.codecs.fingerprint import chain_hash
from millpond.codecs.messages import Snapshot
from millpond.runtime.errors import BlockError, EngineError
from millpond.runtime.kv.files import Draft, check_parts, file_bytes, temporary_path
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.layout import LayerGroup
from millpond.runtime.kv.plan import Shelves
from millpond.runtime.kv.root import SpillRoot

RefusalReason = Literal["off", "incomplete", "shape", "name", "damaged", "parent", "full"]


@dataclass(slots=True)
class SpillFigures:
    """What became of offers: blocks and bytes written, offered twice, refused by reason."""

    blocks: int
    bytes: int
    duplicates: int
    refused: Counter[RefusalReason]


class Spiller:
    """Used by the store only, on the event loop, by one task."""

    def __init__(self, parts: StoreParts, root: SpillRoot | None, shelves: Shelves | None) -> None:
        self._parts, self._root, self._shelves = parts, root, shelves
        self._groups = {group.index: group for group in parts.layout.groups}
        # mutable state, changed only in accept, finish and _spill
        self._staged: list[Snapshot] = []
        self._written = 0
        self.figures = SpillFigures(0, 0, 0, Counter())

    async def accept(self, message: Snapshot) -> None:
        """Take one part of a block; with the last one the block is written or refused."""
        if self._staged and not _continues(self._staged[-1], message):
            self.finish()
        self._staged.append(message)
        if message.last:
            staged, self._staged = self._staged, []
            await self._dispose(staged)

    def finish(self) -> None:
        """No further part of a block comes: give back what is staged of it."""
        staged, self._staged = self._staged, []
        if staged:
            self.figures.refused["incomplete"] += 1
        self._give(staged, lost=False)

    async def _dispose(self, staged: list[Snapshot]) -> None:
        lost = False
        try:
            refusal = await self._spill(staged)
        except EngineError as error:
            refusal, lost = "off", True  # the thread may still read the slots
            if self._root is not None:
                self._root.turn_off(str(error), self._parts.clock())
        finally:
            self._give(staged, lost)
        if refusal is not None:
            self.figures.refused[refusal] += 1

    async def _spill(self, staged: list[Snapshot]) -> RefusalReason | None:
        root, shelves, last = self._root, self._shelves, staged[-1]
        if root is None or shelves is None or root.problem:
            return "off"
        group = self._groups.get(last.group)
        if group is None or not self._has_shape(group, staged):
            return "shape"
        block = self._identity(group, last)
        if chain_hash(block.fingerprint, block.parent, block.token_ids) != block.chain_hash:
            return "name"
        if shelves.has(group, block.chain_hash):
            self.figures.duplicates += 1
            return None
        draft = await self._draft(root, block, staged)
        if draft is None:
            return "damaged"
        shelf = shelves.of[group.index]
        store = partial(root.store, shelf, draft, self._parts.clock())
        refusal = await self._parts.writer.call(store, self._parts.limits.disk_stall_s)
        if refusal is None:
            self.figures.blocks += 1
            self.figures.bytes += file_bytes(block)
        return refusal

    async def _draft(
        self, root: SpillRoot, block: BlockIdentity, staged: list[Snapshot]
    ) -> Draft | None:
        """Compare what is staged with its digests (I2); None if it differs."""
        pool = self._parts.spill_pool
        views = tuple(pool.view(one.slot, one.lease, one.payload_bytes) for one in staged)
        check = partial(check_parts, views, [one.payload_xxh3 for one in staged])
        try:
            digest = await self._parts.writer.call(check, self._parts.limits.disk_stall_s)
        except BlockError:
            return None
        self._written += 1
        temporary = temporary_path(block, root.options.token, self._written)
        return Draft(block, views, digest, temporary, root.options.sync)

    def _has_shape(self, group: LayerGroup, staged: list[Snapshot]) -> bool:
        """True iff the parts are exactly one block of the group, on the grid (I3)."""
        tokens, last = self._parts.layout.block_tokens, staged[-1]
        plane = 0
        for one in staged:
            if one.first_plane != plane:
                return False
            if one.payload_bytes != one.planes * group.plane_bytes(tokens):
                return False
            plane += one.planes
        on_grid = not last.first_token % tokens and len(last.token_ids) == 4 * tokens
        return plane == group.planes and on_grid

    def _identity(self, group: LayerGroup, message: Snapshot) -> BlockIdentity:
        return BlockIdentity(
            fingerprint=self._parts.fingerprint,
            guard=self._parts.guard,
            group=group,
            block_tokens=self._parts.layout.block_tokens,
            first_token=message.first_token,
            chain_hash=message.chain_hash,
            parent=message.parent,
            token_ids=message.token_ids,
            seal=self._root.options.seal if self._root is not None else None,
        )

    def _give(self, staged: list[Snapshot], lost: bool) -> None:
        pool = self._parts.spill_pool
        for one in staged:
            if lost:
                pool.lose(one.slot, one.lease)
            else:
                pool.give(one.slot, one.lease)


def _continues(before: Snapshot, message: Snapshot) -> bool:
    """True iff a part belongs to the same block as the part before it."""
    return (
        before.request_id == message.request_id
        and before.group == message.group
        and before.first_token == message.first_token
        and before.chain_hash == message.chain_hash
        and before.parent == message.parent
        and before.token_ids == message.token_ids
    )
