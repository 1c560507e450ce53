"""What a prompt can reuse, and what it should spill.  Pure; event loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from millpond.runtime.kv.index import Block, Shelf
from millpond.runtime.kv.layout import KvLayout, LayerGroup


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block that a restore reads: its group, its index in the prompt, and its index entry."""

    group: LayerGroup
    index: int
    entry: Block


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prompt can reuse.

    boundary  tokens that can be restored, a multiple of ``chunk_tokens``
    matched   longest boundary for which every full group is there; 0 without full groups
    blocks    what to read, group by group, ascending
    tips      blocks that stand for all of them when used or pinned
    """

    boundary: int
    matched: int
    blocks: tuple[WantedBlock, ...]
    tips: tuple[Block, ...]


NO_PLAN = Plan(0, 0, (), ())


class Shelves:
    """The shelves of one model, one for each group of its layout; used under the root's guard."""

    def __init__(self, layout: KvLayout, shelf_of: Callable[[LayerGroup], Shelf]) -> None:
        self._layout = layout
        self.of = {group.index: shelf_of(group) for group in layout.groups}

    def has(self, group: LayerGroup, chain_hash: bytes) -> bool:
        """True iff that block is on disk."""
        return chain_hash in self.of[group.index].blocks

    def plan(self, chain: Sequence[bytes], limit: int) -> Plan:
        """Return the longest reuse of a chain of at most ``limit`` tokens."""
        layout = self._layout
        matched = self._matched(chain, limit)
        boundary = self._complete(chain, matched if layout.full_groups else limit)
        blocks = tuple(
            WantedBlock(group, index, self.of[group.index].blocks[chain[index]])
            for group in layout.groups
            for index in layout.blocks_for(group, boundary)
        )
        return Plan(boundary, matched if layout.full_groups else 0, blocks, _tips(blocks))

    def matched_tips(self, chain: Sequence[bytes], matched: int) -> tuple[Block, ...]:
        """Return the last matched block of each full group."""
        end = matched // self._layout.block_tokens
        if not end:
            return ()
        groups = self._layout.full_groups
        return tuple(self.of[group.index].blocks[chain[end - 1]] for group in groups)

    def tips(self, chain: Sequence[bytes]) -> tuple[Block, ...]:
        """Return blocks that stand for all blocks of a chain that are here, boundary or not."""
        found: list[Block] = []
        for group in self._layout.groups:
            blocks = self.of[group.index].blocks
            there = [blocks[name] for name in chain if name in blocks]
            found += there[-1:] if group.is_full else there
        return tuple(found)

    def has_elsewhere(self, group: LayerGroup, chain_hash: bytes) -> bool:
        """True iff another group than this one has that block."""
        others = (shelf for index, shelf in self.of.items() if index != group.index)
        return any(chain_hash in shelf.blocks for shelf in others)

    def why_not_more(
        self, chain: Sequence[bytes], boundary: int
    ) -> Literal["absent", "incomplete_group"]:
        """Return why a hit ends at ``boundary``: the next one has no block, or not all groups."""
        layout = self._layout
        last = chain[(boundary + layout.chunk_tokens) // layout.block_tokens - 1]
        there = any(last in shelf.blocks for shelf in self.of.values())
        return "incomplete_group" if there else "absent"

    def full_from_block(self, chain: Sequence[bytes]) -> int:
        """Return the first block that some full group lacks."""
        groups = self._layout.full_groups
        for index, chain_hash in enumerate(chain):
            if not all(self.has(group, chain_hash) for group in groups):
                return index
        return len(chain)

    def sliding_blocks(
        self, chain: Sequence[bytes], prompt_tokens: int, plan: Plan
    ) -> tuple[int, ...]:
        """Return the blocks, from ``plan.boundary`` on, that some sliding group should get."""
        layout, first = self._layout, plan.boundary // self._layout.block_tokens
        wanted: set[int] = set()
        for boundary in layout.kept_boundaries(prompt_tokens, plan.matched):
            for group in layout.sliding_groups:
                for index in layout.blocks_for(group, boundary):
                    if index >= first and not self.has(group, chain[index]):
                        wanted.add(index)
        return tuple(sorted(wanted))

    def _matched(self, chain: Sequence[bytes], limit: int) -> int:
        layout = self._layout
        blocks = min(limit // layout.block_tokens, len(chain))
        for group in layout.full_groups:
            there = self.of[group.index].blocks
            for index in range(blocks):
                if chain[index] not in there:
                    blocks = index
                    break
        return blocks * layout.block_tokens // layout.chunk_tokens * layout.chunk_tokens

    def _complete(self, chain: Sequence[bytes], boundary: int) -> int:
        """Return the longest boundary, at most this one, with every sliding block it needs."""
        layout = self._layout
        while boundary > 0:
            lacking = [
                index
                for group in layout.sliding_groups
                for index in layout.blocks_for(group, boundary)
                if not self.has(group, chain[index])
            ]
            if not lacking:
                return boundary
            # no boundary behind the lacking block and within its reach can be complete
            boundary = max(lacking) * layout.block_tokens // layout.chunk_tokens
            boundary *= layout.chunk_tokens
        return 0


def _tips(blocks: Sequence[WantedBlock]) -> tuple[Block, ...]:
    tips: dict[int, Block] = {}
    sliding: list[Block] = []
    for block in blocks:
        if block.group.is_full:
            tips[block.group.index] = block.entry
        else:
            sliding.append(block.entry)
    return (*sliding, *tips.values())
