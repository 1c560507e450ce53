"""How a model's KV cache is cut: layer groups, planes, blocks, and which blocks a restore needs.

Invariants

(I1) Layers with the same kind, heads, head_dim and dtype form a group; groups are numbered in the
     order of their first layer; layers that share another layer's K and V belong to none.
(I2) A block's payload is 2·L planes in a row: K of the group's L layers in ascending order,
     then V; a plane is (kv_heads, block_tokens, head_dim), logical order.
(I3) A boundary is a multiple of ``chunk_tokens``.  A full group needs every block below it, a
     sliding group those that hold one of the last ``sliding_window`` tokens below it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, LayerType
from millpond.codecs.errors import DescriptorError


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same kind of cache."""

    index: int
    layer_type: LayerType
    kv_heads: int
    head_dim: int
    dtype: KvDType
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Folder name: ``g<index>-<full|sliding>-h<heads>-d<head_dim>-<dtype>``."""
        kind = self.layer_type.value
        return f"g{self.index}-{kind}-h{self.kv_heads}-d{self.head_dim}-{self.dtype.value}"

    @property
    def is_full(self) -> bool:
        """True for a full-attention group."""
        return self.layer_type is LayerType.FULL

    @property
    def planes(self) -> int:
        """Count of planes of one block: K and V of each layer."""
        return 2 * len(self.layers)

    def plane_bytes(self, tokens: int) -> int:
        """Bytes of one plane of ``tokens`` tokens."""
        return self.kv_heads * tokens * self.head_dim * self.dtype.elem_bytes

    def block_bytes(self, tokens: int) -> int:
        """Payload bytes of one block of ``tokens`` tokens."""
        return self.planes * self.plane_bytes(tokens)

    def parts(self, tokens: int, slot_bytes: int) -> tuple[tuple[int, int], ...]:
        """Cut a block into (first_plane, planes) ranges that each fit a staging slot.

        Raises DescriptorError if one plane alone does not fit.
        """
        per_slot = slot_bytes // self.plane_bytes(tokens)
        if per_slot < 1:
            raise DescriptorError(
                f"staging slot: found {slot_bytes} bytes, expected at least one plane of "
                f"{self.name}, {self.plane_bytes(tokens)} bytes"
            )
        starts = range(0, self.planes, per_slot)
        return tuple((first, min(per_slot, self.planes - first)) for first in starts)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model and the grid that its blocks lie on.

    sliding_boundary_tokens  sliding blocks are kept at multiples of it; 0 keeps every boundary
    """

    groups: tuple[LayerGroup, ...]
    block_tokens: int
    chunk_tokens: int
    sliding_window: int
    sliding_boundary_tokens: int

    @classmethod
    def from_descriptor(
        cls,
        descriptor: KvSpillDescriptor,
        block_tokens: int,
        chunk_tokens: int,
        sliding_boundary_tokens: int,
    ) -> KvLayout:
        """Cut the layers into groups; raises DescriptorError on unequal lengths or a bad grid."""
        _check_grid(block_tokens, chunk_tokens, sliding_boundary_tokens)
        return cls(
            _groups(descriptor),
            block_tokens,
            chunk_tokens,
            descriptor.sliding_window,
            sliding_boundary_tokens,
        )

    @property
    def full_groups(self) -> tuple[LayerGroup, ...]:
        """Groups that need every block of a prefix."""
        return tuple(group for group in self.groups if group.is_full)

    @property
    def sliding_groups(self) -> tuple[LayerGroup, ...]:
        """Groups that need the last window before a boundary."""
        return tuple(group for group in self.groups if not group.is_full)

    def blocks_for(self, group: LayerGroup, boundary: int) -> range:
        """Return the indexes of the blocks that ``group`` needs to restore up to ``boundary``."""
        end = boundary // self.block_tokens
        if group.is_full:
            return range(end)
        return range(max(0, boundary - self.sliding_window) // self.block_tokens, end)

    def reuse_limit(self, prompt_tokens: int) -> int:
        """Return the largest boundary a prompt may reuse: whole chunks, at least one token left."""
        return max(0, prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens

    def kept_boundaries(self, prompt_tokens: int, branch: int = 0) -> tuple[int, ...]:
        """Return the boundaries of a prompt where a later restore may end, ascending.

        They are the last one this prompt may reuse itself, the last one that it fills, multiples of
        ``sliding_boundary_tokens``, and ``branch``, where prompts were seen to part (0: nowhere).
        """
        filled = prompt_tokens // self.chunk_tokens * self.chunk_tokens
        stride = self.sliding_boundary_tokens or self.chunk_tokens
        kept = {self.reuse_limit(prompt_tokens), filled, *range(stride, filled + 1, stride)}
        if branch <= filled:
            kept.add(branch)
        return tuple(sorted(boundary for boundary in kept if boundary > 0))

    def live_bytes(self, tokens: int) -> int:
        """Return the most bytes that a live cache of a sequence of ``tokens`` takes.

        Full groups hold every row; the others a ring, and the rows of a chunk with its window.
        """
        rows = self.sliding_window + self._window_rows(tokens)
        return self._bytes(tokens, rows)

    def tokens_within(self, bytes_max: int, tokens_max: int) -> int:
        """Return the tokens, at most ``tokens_max``, of the longest sequence that fits; or 0."""
        return bisect_right(range(1, tokens_max + 1), bytes_max, key=self.live_bytes)

    def held_bytes(self, tokens: int) -> int:
        """Return the most bytes that a live cache takes that is kept at ``tokens``."""
        return self._bytes(tokens, self._window_rows(tokens))

    def _window_rows(self, tokens: int) -> int:
        return min(tokens, self.sliding_window + self.chunk_tokens)

    def _bytes(self, full_rows: int, sliding_rows: int) -> int:
        return sum(
            group.block_bytes(full_rows if group.is_full else sliding_rows) for group in self.groups
        )

    def minimum_bytes(self, boundary: int) -> int:
        """Return the payload bytes that a restore up to ``boundary`` must read."""
        return sum(
            len(self.blocks_for(group, boundary)) * group.block_bytes(self.block_tokens)
            for group in self.groups
        )


def _groups(descriptor: KvSpillDescriptor) -> tuple[LayerGroup, ...]:
    count = descriptor.num_layers
    source = descriptor.kv_source or tuple(range(count))
    columns = (descriptor.layer_types, descriptor.nkv_heads, descriptor.head_dim, source)
    for name, column in zip(
        ("layer_types", "nkv_heads", "head_dim", "kv_source"), columns, strict=True
    ):
        if len(column) != count:
            raise DescriptorError(f"{name}: found {len(column)} entries, expected {count}")
    members: dict[tuple[LayerType, int, int], list[int]] = {}
    for layer in range(count):
        if source[layer] == layer:
            key = (columns[0][layer], columns[1][layer], columns[2][layer])
            members.setdefault(key, []).append(layer)
    dtype = descriptor.kv_dtype
    return tuple(
        LayerGroup(index, kind, heads, dim, dtype, tuple(layers))
        for index, ((kind, heads, dim), layers) in enumerate(members.items())
    )


def _check_grid(block_tokens: int, chunk_tokens: int, sliding_boundary_tokens: int) -> None:
    if block_tokens < 1:
        raise DescriptorError(f"block_tokens: found {block_tokens}, expected at least 1")
    if chunk_tokens < 1 or chunk_tokens % block_tokens:
        raise DescriptorError(
            f"prefill_chunk_tokens: found {chunk_tokens}, expected a multiple of {block_tokens}"
        )
    if sliding_boundary_tokens % chunk_tokens or sliding_boundary_tokens < 0:
        raise DescriptorError(
            f"sliding_boundary_tokens: found {sliding_boundary_tokens}, "
            f"expected 0 or a multiple of {chunk_tokens}"
        )
