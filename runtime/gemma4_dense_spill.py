"""The seed's port for dense Gemma 4 caches: one layer's token ranges out to bytes and back.

``Gemma4DenseSpillFactory`` checks a descriptor once; ``Gemma4DenseSpill`` is one sequence.  It owns
its device buffers, ``(kv_heads, capacity, head_dim)`` each for K and V, sized by the descriptor:
``sliding_window`` rows of a ring in sliding layers (position p lies in slot ``p % capacity``),
``prompt + max_decode_tokens`` rows in full ones (slot p).  The engine serves through
``runtime.kv.cache`` instead; this is for whoever brings a forward pass of their own.

Invariants

(I1) Which position a slot holds is known, so a row is given out only if it is the one asked for.
(I2) Everything is checked before anything is written: an operation that raises changed nothing.
(I3) A payload is K then V, each (kv_heads, tokens, head_dim) in the KV dtype, in token order, also
     where the ring wrapped: the planes of ``runtime.kv.layout`` for a group of this one layer.

Source of the vocabulary: ``Gemma4DenseSpill`` of the Rust program hf2q.  On the pinned thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, LayerType
from millpond.runtime.errors import BlockError, DescriptorError, KvRangeError
from millpond.runtime.kv.cache import Array
from millpond.runtime.kv.layout import KvLayout, LayerGroup

BLOCK_TOKENS = 256
_EMPTY = -1


class DenseBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Rows ``[first_token, first_token + tokens)`` of one layer, and what they were cut from.

    layer        index of the layer
    layer_type, kv_heads, head_dim, kv_dtype  its shape; must be the descriptor's
    first_token, tokens  positions
    payload      K then V (I3)
    """

    layer: int
    layer_type: LayerType
    kv_heads: int
    head_dim: int
    kv_dtype: KvDType
    first_token: int
    tokens: int
    payload: bytes


class Gemma4DenseSpillFactory:
    """A checked descriptor: layer groups, bytes, capacities, and spills of this shape.

    descriptor    never changes
    groups        layers with the same kind of cache; those that share K and V are in none
    block_tokens  tokens of a block

    Raises DescriptorError for a descriptor of unequal lengths, or one that no cache can have.
    """

    def __init__(self, descriptor: KvSpillDescriptor, block_tokens: int = BLOCK_TOKENS) -> None:
        layout = KvLayout.from_descriptor(descriptor, block_tokens, block_tokens, 0)
        _check(descriptor)
        self.descriptor, self.block_tokens = descriptor, block_tokens
        self.groups = layout.groups
        self._group_of = {layer: group for group in self.groups for layer in group.layers}

    def group_of(self, layer: int) -> LayerGroup:
        """Return the group of a layer that owns K and V.

        Raises DescriptorError if there is no such layer, or if it stores nothing because it shares.
        """
        found = self._group_of.get(layer)
        if found is not None:
            return found
        count = self.descriptor.num_layers
        if 0 <= layer < count:
            source = self.descriptor.kv_source[layer]
            raise DescriptorError(
                f"layer {layer}: stores nothing, it reads K and V of layer {source}"
            )
        raise DescriptorError(f"layer: found {layer}, expected 0 to {count - 1}")

    def block_bytes(self, layer: int, tokens: int | None = None) -> int:
        """Return the payload bytes of ``tokens`` rows, one block if None; 0 if the layer shares.

        Raises DescriptorError if there is no such layer.
        """
        if layer not in self._group_of and 0 <= layer < self.descriptor.num_layers:
            return 0
        return 2 * self.group_of(layer).plane_bytes(self.block_tokens if tokens is None else tokens)

    def capacity(self, layer: int, prompt_tokens: int) -> int:
        """Return the rows that a layer has room for; raises DescriptorError as ``group_of``."""
        if not self.group_of(layer).is_full:
            return self.descriptor.sliding_window
        return prompt_tokens + self.descriptor.max_decode_tokens

    def spill(self, prompt_tokens: int) -> Gemma4DenseSpill:
        """Return the caches of a new sequence; nothing is allocated before the first row.

        Raises KvRangeError for a negative count.
        """
        if prompt_tokens < 0:
            raise KvRangeError(f"prompt_tokens: found {prompt_tokens}, expected 0 or more")
        return Gemma4DenseSpill(self, prompt_tokens)


class Gemma4DenseSpill:
    """The caches of one sequence; made by ``Gemma4DenseSpillFactory.spill``."""

    def __init__(self, factory: Gemma4DenseSpillFactory, prompt_tokens: int) -> None:
        self._factory, self._prompt_tokens = factory, prompt_tokens
        # mutable state, changed only in _put
        self._layers: dict[int, _Layer] = {}

    def __repr__(self) -> str:
        return f"<Gemma4DenseSpill {len(self._layers)} layers in use, {self.bytes} bytes>"

    @property
    def bytes(self) -> int:
        """Bytes of the buffers that are allocated."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers.values())

    def positions(self, layer: int) -> list[int]:
        """Return the positions whose rows a layer holds, ascending; raises DescriptorError."""
        self._factory.group_of(layer)
        found = self._layers.get(layer)
        if found is None:
            return []
        return sorted(found.slots[found.slots != _EMPTY].tolist())

    def write(self, layer: int, first_token: int, keys: Array, values: Array) -> None:
        """Add rows that a forward pass computed; of more than a ring holds, the last ones stay.

        keys, values  (kv_heads, tokens, head_dim) in the KV dtype

        Raises DescriptorError (no such layer, or it shares), BlockError (another shape or dtype) or
        KvRangeError (no room, or newer rows are in their place).
        """
        group = self._factory.group_of(layer)
        tokens = keys.shape[1] if keys.ndim == 3 else 0
        expected = (group.kv_heads, tokens, group.head_dim)
        for name, rows in (("keys", keys), ("values", values)):
            if tuple(rows.shape) != expected or not tokens:
                raise BlockError(f"{name}: found shape {tuple(rows.shape)}, expected {expected}")
            if rows.dtype != group.dtype.to_mlx_dtype():
                raise BlockError(f"{name}: found {rows.dtype}, expected {group.dtype.value}")
        if not group.is_full:
            skipped = max(0, tokens - self._factory.descriptor.sliding_window)
            keys, values = keys[:, skipped:, :], values[:, skipped:, :]
            first_token += skipped
        self._put(group, (layer, first_token), keys, values)

    def snapshot_block(self, layer: int, first_token: int, tokens: int) -> DenseBlock:
        """Return rows ``[first_token, first_token + tokens)`` of a layer, in token order.

        Raises DescriptorError (no such layer, or it shares) or KvRangeError (a row is not there:
        never written, or overwritten by the ring).
        """
        group = self._factory.group_of(layer)
        slots = self._slots(group, layer, first_token, tokens)
        found = self._layers.get(layer)
        wanted = np.arange(first_token, first_token + tokens)
        if found is None or not np.array_equal(found.slots[slots], wanted):
            raise KvRangeError(
                f"layer {layer}: found other rows in the place of "
                f"{first_token} to {first_token + tokens - 1}, expected those"
            )
        index = mx.array(slots)
        parts = [mx.take(rows, index, axis=1) for rows in (found.keys, found.values)]
        return DenseBlock(
            layer=layer,
            layer_type=group.layer_type,
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            kv_dtype=group.dtype,
            first_token=first_token,
            tokens=tokens,
            payload=b"".join(_bytes_of(part, group.dtype) for part in parts),
        )

    def restore_block(self, layer: int, first_token: int, block: DenseBlock) -> None:
        """Put rows back where they were; allocates a layer that has no buffers yet.

        Raises DescriptorError (no such layer, or it shares), BlockError (layer, layer type, shape,
        dtype, range or length is not what the descriptor and the arguments say) or KvRangeError (no
        room, or newer rows are in their place).  The cache is untouched then.
        """
        group = self._factory.group_of(layer)
        expected = {
            "layer": layer,
            "layer_type": group.layer_type,
            "kv_heads": group.kv_heads,
            "head_dim": group.head_dim,
            "kv_dtype": group.dtype,
            "first_token": first_token,
        }
        for name, value in expected.items():
            found = getattr(block, name)
            if type(found) is not type(value) or found != value:
                raise BlockError(f"{name}: found {found}, expected {value}", "mismatch")
        self._slots(group, layer, first_token, block.tokens)
        size = self._factory.block_bytes(layer, block.tokens)
        if len(block.payload) != size:
            raise BlockError(f"payload: found {len(block.payload)} bytes, expected {size}")
        shape = (2, group.kv_heads, block.tokens, group.head_dim)
        both = _array_of(block.payload, group.dtype).reshape(shape)
        self._put(group, (layer, first_token), both[0], both[1])

    def _slots(self, group: LayerGroup, layer: int, first_token: int, tokens: int) -> Any:
        """Return the slot of each position; raises KvRangeError for a range that cannot be held."""
        capacity = self._factory.capacity(layer, self._prompt_tokens)
        last = first_token + tokens - 1
        if (
            first_token < 0
            or tokens < 1
            or tokens > capacity
            or (group.is_full and last >= capacity)
        ):
            raise KvRangeError(
                f"layer {layer}: found positions {first_token} to {last}, "
                f"expected 1 to {capacity} of them"
                + (f" below {capacity}" if group.is_full else "")
            )
        positions = np.arange(first_token, first_token + tokens)
        return positions if group.is_full else positions % capacity

    def _put(self, group: LayerGroup, place: tuple[int, int], keys: Array, values: Array) -> None:
        layer, first_token = place
        tokens = keys.shape[1]
        slots = self._slots(group, layer, first_token, tokens)
        found = self._layers.get(layer)
        if found is None:
            found = _Layer(group, self._factory.capacity(layer, self._prompt_tokens))
        held, positions = found.slots[slots], np.arange(first_token, first_token + tokens)
        if (held > positions).any():
            raise KvRangeError(
                f"layer {layer}: found newer rows, up to {held.max()}, in the place of "
                f"{first_token} to {first_token + tokens - 1}"
            )
        found.take_in(slots, positions, keys, values)
        self._layers[layer] = found


class _Layer:
    """Buffers of one layer, and the position that each slot holds, -1 for none (I1)."""

    def __init__(self, group: LayerGroup, capacity: int) -> None:
        shape, dtype = (group.kv_heads, capacity, group.head_dim), group.dtype.to_mlx_dtype()
        self.keys: Array = mx.zeros(shape, dtype=dtype)
        self.values: Array = mx.zeros(shape, dtype=dtype)
        self.slots = np.full(capacity, _EMPTY, np.int64)

    def take_in(self, slots: Any, positions: Any, keys: Array, values: Array) -> None:
        """Write rows to these slots, all of them different."""
        index = mx.array(slots)
        self.keys[:, index, :] = keys
        self.values[:, index, :] = values
        mx.eval(self.keys, self.values)
        self.slots[slots] = positions


def _check(descriptor: KvSpillDescriptor) -> None:
    """Raise DescriptorError for numbers that no cache can have; the lengths are equal."""
    count = descriptor.num_layers
    source = descriptor.kv_source or tuple(range(count))
    slides = LayerType.SLIDING in descriptor.layer_types
    for name, least in (("num_layers", 1), ("max_decode_tokens", 0), ("sliding_window", slides)):
        if getattr(descriptor, name) < least:
            raise DescriptorError(
                f"{name}: found {getattr(descriptor, name)}, expected at least {int(least)}"
            )
    columns = (descriptor.layer_types, descriptor.nkv_heads, descriptor.head_dim)
    shapes = list(zip(*columns, strict=True))
    for layer, (_, heads, dim) in enumerate(shapes):
        if heads < 1 or dim < 1:
            raise DescriptorError(
                f"layer {layer}: found {heads} heads of {dim}, expected 1 or more"
            )
        owner = source[layer]
        if not 0 <= owner < count or source[owner] != owner or shapes[owner] != shapes[layer]:
            raise DescriptorError(
                f"layer {layer}: found kv_source {owner}, expected a layer of the same shape that "
                "owns its K and V"
            )


def _bytes_of(rows: Array, dtype: KvDType) -> bytes:
    """The bits as they are: numpy knows no bfloat16."""
    bits = rows.view(mx.uint32 if dtype.elem_bytes == 4 else mx.uint16)
    return bytes(np.array(bits).tobytes())


def _array_of(payload: bytes, dtype: KvDType) -> Array:
    bits = np.frombuffer(payload, np.uint32 if dtype.elem_bytes == 4 else np.uint16)
    return mx.array(bits).view(dtype.to_mlx_dtype())
