"""Arrays of the device as the host sees them.  Pinned thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

SLICE_BYTES = 4 * 2**20  # mx.array holds the interpreter lock while it copies: about 1 ms
_HALVES = (mx.float16, mx.bfloat16)


def is_shared() -> bool:
    """True iff host and device use one memory (a CPU, Metal): then a view is the array itself."""
    return bool(mx.default_device() == mx.cpu or mx.metal.is_available())


def host_view(array: Any) -> Any:
    """Return an evaluated array as a numpy array without a copy; 16-bit floats as uint16.

    Where memory is shared, writing to the view changes the array, so only its owner may, and only
    while no graph uses it.
    """
    return np.array(array.view(mx.uint16) if array.dtype in _HALVES else array, copy=False)


def host_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of ``host_view`` for an array of ``dtype``; KV dtypes only."""
    return np.dtype(np.uint16 if dtype in _HALVES else np.float32)
