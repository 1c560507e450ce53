"""A process that spills blocks until it is killed; ``python kv_writer.py ROOT SEED BYTES_MAX``.

Prints a line once the root is open and for every block that was published.
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

import anyio
import xxhash
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_hash, chain_root
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.files import Draft, temporary_path
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.layout import LayerGroup
from millpond.runtime.kv.root import RootOptions, SpillRoot, open_spill_root
from millpond.runtime.threads import PinnedThread

GROUP = LayerGroup(0, LayerType.FULL, 2, 16, KvDType.F32, (0, 1))
TOKENS = 16
FINGERPRINT, GUARD = b"f" * 32, b"g" * 32


def payload_of(block: BlockIdentity) -> bytes:
    """Return the payload that this block must have."""
    return hashlib.shake_128(block.chain_hash).digest(block.payload_bytes)


def prompt_blocks(seed: int, count: int) -> list[BlockIdentity]:
    """Return the blocks of one prompt."""
    parent = chain_root(FINGERPRINT, GUARD, "exact")
    found = []
    for index in range(count):
        ids = pack_tokens([(seed * 10_007 + index * TOKENS + k) % 2**32 for k in range(TOKENS)])
        name = chain_hash(FINGERPRINT, parent, ids)
        found.append(
            BlockIdentity(FINGERPRINT, GUARD, GROUP, TOKENS, index * TOKENS, name, parent, ids)
        )
        parent = name
    return found


async def spill(root: SpillRoot, worker: PinnedThread, block: BlockIdentity, number: int) -> str:
    """Publish one block; return why not, or nothing."""
    payload = memoryview(payload_of(block))
    temporary = temporary_path(block, root.options.token, number)
    draft = Draft(block, (payload,), xxhash.xxh3_128_digest(payload), temporary, root.options.sync)
    shelf = root.shelf(block.path.rsplit("/", 2)[0])
    if block.chain_hash in shelf.blocks:
        return "there"
    return await worker.call(partial(root.store, shelf, draft, 0.0)) or ""


async def main(path: str, seed: int, bytes_max: int) -> None:
    """Write prompts of eight blocks for ever."""
    async with PinnedThread("disk") as worker:
        options = RootOptions(token=f"w{seed}", bytes_max=bytes_max)
        root = await worker.call(lambda: open_spill_root(Path(path), bytes_max, options))
        print("open", flush=True)
        number = 0
        for prompt in range(10**9):
            for block in prompt_blocks(seed * 1000 + prompt, 8):
                number += 1
                refused = await spill(root, worker, block, number)
                print(refused or block.chain_hash.hex(), flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
