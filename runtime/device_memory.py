"""How much memory the device has.  Pinned thread only."""

from __future__ import annotations

import os
from collections.abc import Mapping

import mlx.core as mx

_NAMES = ("memory_size", "total_memory")  # as the GPU backends of MLX report it


def memory_bytes() -> int:
    """Return the bytes of memory of MLX's device: the host's own on a CPU."""
    if mx.default_device() != mx.cpu:
        found: Mapping[str, object] = mx.device_info()
        for name in _NAMES:
            value = found.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
