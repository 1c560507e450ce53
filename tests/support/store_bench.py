"""A store over real arrows, threads and a real disk; whoever opens it plays gateway and engine."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import xxhash
from millpond.actors.store import Store, StoreParts
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_root
from millpond.codecs.messages import (
    Admit,
    Held,
    Offer,
    Restore,
    Snapshot,
    Submit,
    ToEngine,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox, channel
from millpond.runtime.config import Limits
from millpond.runtime.kv.blocks import block_chain, pack_tokens
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.kv.root import RootOptions, SpillRoot
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import PinnedThread

BLOCK = 4
FINGERPRINT, GUARD = b"f" * 32, b"g" * 32
SLIDING = LayerGroup(0, LayerType.SLIDING, 1, 4, KvDType.F32, (0, 1))
FULL = LayerGroup(1, LayerType.FULL, 2, 4, KvDType.F32, (2,))
LAYOUT = KvLayout((SLIDING, FULL), BLOCK, BLOCK, 8, 16)
ROOT = chain_root(FINGERPRINT, GUARD, "exact")
TOKENS = itertools.count()
DEFAULTS = Limits()


def rows(group: LayerGroup, chain_hash: bytes) -> bytes:
    """The payload of a block: a function of everything before it, so a wrong row shows."""
    seed = chain_hash + bytes([group.index])
    return hashlib.shake_128(seed).digest(group.block_bytes(BLOCK))


class FaultyDisk(PosixDisk):
    """A real disk whose operations can be made to fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faults: dict[str, Callable[[str], None]] = {}

    def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
        self.faults.get("read", lambda path: None)(path)
        return super().read_into(path, offset, *buffers)

    def write(self, path: str, parts: Any, sync: bool) -> None:
        self.faults.get("write", lambda path: None)(path)
        super().write(path, parts, sync)

    def remove(self, path: str) -> None:
        self.faults.get("remove", lambda path: None)(path)
        super().remove(path)


@dataclass
class Admitted:
    """What the engine got for one request."""

    admit: Admit
    planes: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass
class Bench:
    """Both far ends of the store, and a model that the test plays."""

    store: Store
    root: SpillRoot | None
    layout: KvLayout
    submissions: Outbox[ToStore]
    offers: Outbox[Offer]
    admissions: Inbox[ToEngine]
    restore_pool: StagingPool
    spill_pool: StagingPool
    clock: list[float]
    ids: Any = field(default_factory=itertools.count)

    def submit(self, tokens: list[int], root: bytes = ROOT, **options: Any) -> Submit:
        packed = pack_tokens(tokens)
        return Submit(
            request_id=next(self.ids),
            token_ids=packed,
            root=root,
            chain=block_chain(FINGERPRINT, root, packed, BLOCK),
            sampling=SamplingParams(),
            **options,
        )

    async def admit(self, submit: Submit) -> Admitted:
        """Send a request and collect its restored planes, as the engine would."""
        await self.submissions.send(submit)
        found: dict[tuple[int, int], bytes] = {}
        while True:
            message = await self.admissions.receive()
            assert message.request_id == submit.request_id
            if isinstance(message, Admit):
                assert not (message.prefix_tokens == 0 and message.restored.blocks)
                await self.offers.send(Held(request_id=message.request_id))
                return Admitted(message, found if message.prefix_tokens else {})
            assert isinstance(message, Restore)
            if message.starts_over:
                found.clear()
            view = self.restore_pool.view(message.slot, message.lease, message.payload_bytes)
            key = (message.group, message.first_token)
            if not message.first_plane:
                found[key] = b""
            group = self.layout.groups[message.group]
            assert len(found[key]) == message.first_plane * group.plane_bytes(BLOCK)
            found[key] += bytes(view)
            self.restore_pool.give(message.slot, message.lease)

    async def offer(self, submit: Submit, group: LayerGroup, index: int, /, **changes: Any) -> None:
        """Offer one block, as the engine would after its chunk."""
        payload = changes.pop("payload", rows(group, submit.chain[index]))
        parts = group.parts(BLOCK, self.spill_pool.slot_bytes)
        for first, planes in parts:
            size = group.plane_bytes(BLOCK)
            piece = payload[first * size : (first + planes) * size]
            lease = await self.spill_pool.lend(len(piece))
            lease.buffer[:] = piece
            fields: dict[str, Any] = {
                "request_id": submit.request_id,
                "group": group.index,
                "first_token": index * BLOCK,
                "chain_hash": submit.chain[index],
                "parent": submit.chain[index - 1] if index else submit.root,
                "token_ids": submit.token_ids[4 * index * BLOCK : 4 * (index + 1) * BLOCK],
                "first_plane": first,
                "planes": planes,
                "last": first + planes == group.planes,
                "slot": lease.slot,
                "lease": lease.lease,
                "payload_bytes": len(piece),
                "payload_xxh3": xxhash.xxh3_128_digest(piece),
            }
            await self.offers.send(Snapshot(**fields | changes))

    async def run(self, tokens: list[int], **options: Any) -> Admitted:
        """Admit a prompt, check every restored row, offer what the store asks for, drain."""
        submit = self.submit(tokens, **options)
        admitted = await self.admit(submit)
        self.check(submit, admitted)
        admit = admitted.admit
        if admit.offers:
            for index in range(admit.prefix_tokens // BLOCK, len(submit.chain)):
                for group in self.layout.groups:
                    wanted = index >= admit.full_from_block
                    if not group.is_full:
                        wanted = index in admit.sliding_blocks
                    if wanted:
                        await self.offer(submit, group, index)
        await self.store.drain(10)
        return admitted

    def check(self, submit: Submit, admitted: Admitted) -> None:
        boundary = admitted.admit.prefix_tokens
        expected = {
            (group.index, index * BLOCK): rows(group, submit.chain[index])
            for group in self.layout.groups
            for index in self.layout.blocks_for(group, boundary)
        }
        assert admitted.planes == expected

    def files(self) -> list[Path]:
        assert self.root is not None
        found = Path(self.root.disk.root).rglob("*.safetensors")  # type: ignore[attr-defined]
        return sorted(path for path in found if "quarantine" not in path.parts)

    def path(self, submit: Submit, group: LayerGroup, index: int) -> Path:
        name = f"{submit.chain[index].hex()}.safetensors"
        return next(path for path in self.files() if path.name == name and group.name in str(path))


@asynccontextmanager
async def opened(
    path: Path | None,
    *,
    layout: KvLayout = LAYOUT,
    limits: Limits = DEFAULTS,
    bytes_max: int = 2**30,
    slot_bytes: int = 4096,
    slots: int = 4,
    guard: bytes = GUARD,
    room: int = 64,
) -> AsyncIterator[Bench]:
    clock = [0.0]
    arrows = [
        channel("submissions", ToStore, room),
        channel("offers", Offer, room),
        channel("admissions", ToEngine, room),
    ]
    pools = [StagingPool(name, slots, slot_bytes) for name in ("restore", "spill")]
    async with PinnedThread("a") as a, PinnedThread("b") as b, PinnedThread("w") as writer:
        root = None
        if path is not None:
            options = RootOptions(
                token=f"t{next(TOKENS)}",
                bytes_max=bytes_max,
                quarantine_bytes_max=limits.quarantine_bytes_max,
            )
            root = await writer.call(lambda: SpillRoot.open(FaultyDisk(path), options))
        parts = StoreParts(
            layout=layout,
            fingerprint=FINGERPRINT,
            guard=guard,
            limits=limits,
            root=root,
            readers=(a, b),
            writer=writer,
            restore_pool=pools[0],
            spill_pool=pools[1],
            clock=lambda: clock[0],
        )
        store = Store(parts)
        async with anyio.create_task_group() as group:
            group.start_soon(store.run, arrows[0][1], arrows[1][1], arrows[2][0])
            ends = (arrows[0][0], arrows[1][0], arrows[2][1])
            bench = Bench(store, root, layout, *ends, *pools, clock)
            try:
                yield bench
            finally:
                bench.submissions.close()
                bench.offers.close()
        if root is not None:
            root.close()
    assert all(pool.statistics().lent == 0 for pool in pools), "a slot did not come home"


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + index for index in range(tokens)]
