"""Planes of KV blocks between host buffers and live caches.  Pinned thread only.

A plane is K or V of one layer over one block; ``kv.layout`` has the order.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from millpond.runtime.host_memory import SLICE_BYTES, host_dtype, host_view, is_shared
from millpond.runtime.host_transfers import PIECE_BYTES, Transfers
from millpond.runtime.kv.cache import LiveCaches, RowError
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.steps import RestorePlanes, SnapshotPlanes


def put_planes(
    layout: KvLayout, one: RestorePlanes, caches: LiveCaches, transfers: Transfers
) -> None:
    """Copy the payload's planes behind the rows of their layers; it may be reused on return.

    Where memory is shared, the rows of full layers are copied straight into their buffers.
    Elsewhere the caches are not evaluated, and none of their buffers may be held until they are:
    one that something else holds is copied whole, not extended.  Raises RowError; some planes may
    be in place then.
    """
    group = _group(layout, one)
    dtype = group.dtype.to_mlx_dtype()
    planes = _planes(group, one, dtype)
    if group.is_full and is_shared():
        for index, rows in enumerate(planes, one.first_plane):
            layer, which = _place(group, index)
            caches[layer].put_host(which, one.first_token, rows)
        return
    # a transfer for each plane is slower
    together = max(1, (SLICE_BYTES if is_shared() else PIECE_BYTES) // planes[0].nbytes)
    for start in range(0, one.planes, together):
        some = planes[start : start + together]
        moved = mx.array(some).view(dtype) if is_shared() else transfers.to_device(some, dtype)
        for index, rows in enumerate(moved, start):
            layer, which = _place(group, one.first_plane + index)
            caches[layer].put(which, one.first_token, rows)


def take_planes(
    layout: KvLayout, one: SnapshotPlanes, caches: LiveCaches, transfers: Transfers
) -> bytes:
    """Copy planes into the payload; return its xxh3-128.  Raises RowError."""
    group = _group(layout, one)
    target = _planes(group, one, group.dtype.to_mlx_dtype())
    if not target.flags.writeable:
        raise RowError("payload: found a read-only buffer, expected a writable one")
    places = [_place(group, one.first_plane + index) for index in range(one.planes)]
    found = [caches[layer].take(which, one.first_token, one.tokens) for layer, which in places]
    if not is_shared():
        found = [mx.contiguous(rows) for rows in found]  # one transfer, not one for each head
    mx.eval(found)
    pairs = [(plane, host_view(rows)) for plane, rows in zip(target, found, strict=True)]
    if is_shared():
        for pair in pairs:
            np.copyto(*pair)
    else:
        transfers.copy(pairs)
    return xxhash.xxh3_128_digest(one.payload)


def _group(layout: KvLayout, one: RestorePlanes | SnapshotPlanes) -> LayerGroup:
    """Return the group that planes belong to, once their range and size are right."""
    if not 0 <= one.group < len(layout.groups):
        raise RowError(f"group: found {one.group}, expected 0 to {len(layout.groups) - 1}")
    group, end = layout.groups[one.group], one.first_plane + one.planes
    if not 0 <= one.first_plane < end <= group.planes:
        raise RowError(f"planes: found {one.first_plane} to {end}, expected 0 to {group.planes}")
    if one.tokens < 1 or one.first_token < 0:
        raise RowError(f"found {one.tokens} tokens from {one.first_token} on, expected some")
    expected = one.planes * group.plane_bytes(one.tokens)
    if one.payload.nbytes != expected:
        raise RowError(f"payload: found {one.payload.nbytes} bytes, expected {expected}")
    return group


def _planes(group: LayerGroup, one: RestorePlanes | SnapshotPlanes, dtype: Any) -> Any:
    shape = (one.planes, group.kv_heads, one.tokens, group.head_dim)
    return np.frombuffer(one.payload, dtype=host_dtype(dtype)).reshape(shape)


def _place(group: LayerGroup, plane: int) -> tuple[int, int]:
    """Return the layer that a plane belongs to, and whether it is its K (0) or V (1)."""
    count = len(group.layers)
    return group.layers[plane % count], plane // count
