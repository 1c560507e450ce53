"""The public names: ``open_runtime``, its configuration, its parameters and its errors.

Importing this package imports neither MLX nor an actor; the names are looked up when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.codecs.choices import SamplingParams
    from millpond.runtime.api import Runtime, open_runtime, open_shared
    from millpond.runtime.config import Limits, RuntimeConfig
    from millpond.runtime.results import Completion, StreamedToken

_HOMES = {
    "Completion": "millpond.runtime.results",
    "Limits": "millpond.runtime.config",
    "Runtime": "millpond.runtime.api",
    "RuntimeConfig": "millpond.runtime.config",
    "SamplingParams": "millpond.codecs.messages",
    "StreamedToken": "millpond.runtime.results",
    "open_runtime": "millpond.runtime.api",
    "open_shared": "millpond.runtime.api",
}

__all__ = [
    "Completion",
    "Limits",
    "Runtime",
    "RuntimeConfig",
    "SamplingParams",
    "StreamedToken",
    "open_runtime",
    "open_shared",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
