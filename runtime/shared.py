"""What the houses of one process share: the disk threads and the spill root."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import EngineError, SpillError
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.kv.keys import read_key
from millpond.runtime.kv.root import RootOptions, SpillRoot, open_spill_root
from millpond.runtime.threads import PinnedThread, Thread

_log = logging.getLogger(__name__)
TOKEN_BYTES = 8  # of a writer token: enough never to meet another one
THREAD_CLOSE_S = 10.0  # a thread that still runs a call then is left behind; it is a daemon


@dataclass(frozen=True, slots=True)
class Shared:
    """What the houses of one process share: disk threads, and one spill root.

    root           None if nothing is spilled
    spill_problem  why not, if it was wanted; else empty
    """

    readers: tuple[Thread, ...]
    writer: Thread
    root: SpillRoot | None
    spill_problem: str

    def guard(self, identity: ModelIdentity) -> bytes:
        """Return the guard of a model's blocks here, which a key is a part of (``kv.sealing``)."""
        seal = self.root.options.seal if self.root is not None else None
        return identity.guard if seal is None else seal.guard(identity.guard)


@asynccontextmanager
async def open_shared(config: RuntimeConfig) -> AsyncIterator[Shared]:
    """Open the spill root and its threads; give it to every ``open_runtime`` of the process.

    A root that cannot be used raises nothing: the houses serve without spilling.
    """
    limits = config.limits
    async with AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(PinnedThread(f"disk-read-{index}", THREAD_CLOSE_S))
            for index in range(max(1, limits.disk_readers))
        ]
        writer = await stack.enter_async_context(PinnedThread("disk-write", THREAD_CLOSE_S))
        root, problem = None, ""
        if config.spill:
            try:
                root = await writer.call(partial(_open_root, config), limits.disk_stall_s * 10)
            except (SpillError, EngineError) as error:
                problem = str(error)
                _log.warning("spilling is off: %s", problem)
        if root is not None:
            stack.callback(root.close)
        yield Shared(tuple(readers), writer, root, problem)


def _open_root(config: RuntimeConfig) -> SpillRoot:
    """On the disk thread: open the folder and index what is there.  Raises SpillFailed."""
    limits = config.limits
    options = RootOptions(
        token=secrets.token_hex(TOKEN_BYTES),
        bytes_max=0,  # replaced by the budget, once the size of the file system is known
        free_bytes_min=limits.free_bytes_min,
        quarantine_bytes_max=limits.quarantine_bytes_max,
        stall_s=limits.disk_stall_s,
        sync=config.durability == "power",
        seal=read_key(config.spill_key_file, os.environ),
    )
    return open_spill_root(config.resolved_spill_root(), config.spill_bytes_max, options)
