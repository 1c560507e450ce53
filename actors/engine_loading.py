"""Weights in: staged rows of every tensor to the pinned thread, until the loader is done."""

from __future__ import annotations

from functools import partial
from typing import assert_never

from millpond.actors.engine_parts import EngineParts
from millpond.codecs.messages import Loaded, Tensor, Weights
from millpond.runtime.channels import Inbox
from millpond.runtime.errors import ModelUnreadable


async def load(parts: EngineParts, weights: Inbox[Weights]) -> None:
    """Build the model; raises ModelError if it cannot be loaded, EngineError for a broken thread.

    Every slot that came is given back, but for one that the thread may still read.
    """
    pool, warm_s = parts.weight_pool, parts.limits.engine_warm_s
    loaded = False
    async with weights:
        async for message in weights:
            match message:
                case Tensor():
                    view = pool.view(message.slot, message.lease, message.payload_bytes)
                    copy = partial(parts.runner.load_rows, message, view)
                    await parts.thread.call(copy, warm_s)
                    pool.give(message.slot, message.lease)
                case Loaded():
                    if message.error:
                        raise ModelUnreadable(message.error)
                    loaded = True
                case _:
                    assert_never(message)
    if not loaded:
        raise ModelUnreadable("the weights ended before the loader said so")
    await parts.thread.call(parts.runner.finish_load, warm_s)
