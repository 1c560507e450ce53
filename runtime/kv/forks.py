"""Live caches made of others, at the boundaries that ``steps.Fork`` names.  Pinned thread only."""

from __future__ import annotations

import mlx.core as mx
from millpond.runtime.kv.cache import Array, LiveCaches


def forked(source: LiveCaches, tokens: int, tokens_max: int) -> LiveCaches:
    """Return caches of their own with the first rows of others, evaluated; raises RowError."""
    found = {layer: cache.fork(tokens, tokens_max) for layer, cache in source.items()}
    mx.eval(arrays_of(found))  # from here on the source's buffers are its own again
    return found


def cut(caches: LiveCaches, tokens: int) -> None:
    """Keep what forks need up to a boundary, in memory that fits; raises RowError."""
    for cache in caches.values():
        cache.cut(tokens)
    mx.eval(arrays_of(caches))


def arrays_of(caches: LiveCaches) -> list[Array]:
    """Return the device arrays of all layers, for evaluation."""
    return [array for cache in caches.values() for array in cache.arrays()]
