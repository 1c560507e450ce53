"""How the models of a pool are opened and measured: real runtimes that share one spill root."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from anyio import CapacityLimiter
from millpond.runtime.api import Shared, open_runtime
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.served import RuntimeModel, serve_runtime

_WIDTHS = {"float32": 4, "bfloat16": 2}


class PoolModels:
    """Opens model files under one configuration.

    config    of every model, but for ``model``
    shared    disk threads and spill root
    encoders  threads that tokenise at once, over all models
    """

    def __init__(self, config: RuntimeConfig, shared: Shared, encoders: int) -> None:
        self._config, self._shared = config, shared
        self._encoders = CapacityLimiter(encoders)
        # mutable state, changed only in open
        self._width = _WIDTHS[config.compute_dtype or "float32"]

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[RuntimeModel]:
        """Load a model for the time of the block; raises as ``open_runtime`` does."""
        config = msgspec.structs.replace(self._config, model=path)
        async with open_runtime(config, self._shared) as runtime:
            # all models run on one device: what the first one computes with, the next ones will
            self._width = _WIDTHS[runtime.identity.numerics.compute_dtype]
            yield await serve_runtime(runtime, self._encoders)

    def measure(self, path: str) -> int:
        """Return the bytes of a file's weights as held, dense; on a thread.

        Reads the header only; float32 is assumed until a model was loaded.  Raises ModelNotFound,
        ModelUnreadable.
        """
        with GgufFile.open(path) as file:
            return self._width * sum(tensor.elements for tensor in file.tensors.values())
