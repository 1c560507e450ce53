#!/usr/bin/env python3
"""Measure the spill store against plain reads and writes of the same bytes.  One JSON line.

    scripts/bench_store.py
    scripts/bench_store.py --folder /mnt/disk --tokens 8192 --repeats 5 --open-blocks 50000

restore   the store's own restore of a prefix, checksums and arrows included, against readv of the
          same files into one buffer; warm page cache
spill     the same for offers against writev and rename, without syncing, as the store's default
bytes     whole files that a restore reads, against the least that the layout allows
open      seconds with the journal and without, and bytes of memory for a block
offer     engine's milliseconds for a block beyond the device copy; the checksum grows with it
Figures are medians; ``spread`` is (largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import xxhash
from millpond.actors.engine_offers import Offers
from millpond.actors.store import Store, StoreParts
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_root
from millpond.codecs.messages import (
    Admit,
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
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.kv.root import RootOptions, open_spill_root
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import PinnedThread

BLOCK = 256
FINGERPRINT, GUARD = b"f" * 32, b"g" * 32
ROOT = chain_root(FINGERPRINT, GUARD, "exact")
LIMIT = 2**50
SLOT_BYTES = 2**24  # of the offers that are measured


def _layout(sliding: tuple[int, int, int], full: tuple[int, int, int], dtype: KvDType) -> KvLayout:
    """Return a layout from (layers, kv_heads, head_dim) of both kinds."""
    groups = tuple(
        LayerGroup(index, kind, heads, dim, dtype, tuple(range(layers)))
        for index, (kind, (layers, heads, dim)) in enumerate(
            ((LayerType.SLIDING, sliding), (LayerType.FULL, full))
        )
    )
    return KvLayout(groups, BLOCK, BLOCK, 512 if dtype is KvDType.F32 else 1024, 1024)


SHAPES = {
    "gemma-3-270m": _layout((15, 1, 256), (3, 1, 256), KvDType.F32),
    "gemma-4-31b": _layout((50, 16, 256), (10, 4, 512), KvDType.BF16),
}


class Bench:
    """A store with both its far ends."""

    def __init__(self, layout: KvLayout, submit: Submit) -> None:
        self.layout, self.submit = layout, submit
        slot = max(group.block_bytes(BLOCK) for group in layout.groups)
        self.restore, self.spill = (StagingPool(name, 8, slot) for name in ("restore", "spill"))

    async def run(self, folder: Path, act: Callable[..., Any]) -> Any:
        """Open the root, run the store, and let ``act`` play gateway and engine."""
        async with PinnedThread("a") as a, PinnedThread("b") as b, PinnedThread("w") as writer:
            options = RootOptions(token=os.urandom(16).hex(), bytes_max=LIMIT)
            root = await writer.call(lambda: open_spill_root(folder, LIMIT, options))
            parts = StoreParts(
                layout=self.layout,
                fingerprint=FINGERPRINT,
                guard=GUARD,
                limits=Limits(),
                root=root,
                readers=(a, b),
                writer=writer,
                restore_pool=self.restore,
                spill_pool=self.spill,
                clock=time.monotonic,
            )
            store = Store(parts)
            submissions = channel("submissions", ToStore, 64)
            offers = channel("offers", Offer, 64)
            admissions = channel("admissions", ToEngine, 64)
            async with anyio.create_task_group() as group:
                group.start_soon(store.run, submissions[1], offers[1], admissions[0])
                try:
                    return await act(store, submissions[0], offers[0], admissions[1])
                finally:
                    submissions[0].close()
                    offers[0].close()

    async def offer_all(
        self, store: Store, _: Outbox[ToStore], offers: Outbox[Offer], __: Inbox[ToEngine]
    ) -> float:
        """Offer every block of the prefix; return the seconds until all are written."""
        payloads = {
            group.index: os.urandom(group.block_bytes(BLOCK)) for group in self.layout.groups
        }
        digests = {index: xxhash.xxh3_128_digest(data) for index, data in payloads.items()}
        started = time.perf_counter()
        for index in range(len(self.submit.chain)):
            for group in self.layout.groups:
                size = len(payloads[group.index])
                lease = await self.spill.lend(size)
                if not index:
                    lease.buffer[:] = payloads[group.index]
                digest = digests[group.index] if not index else xxhash.xxh3_128_digest(lease.buffer)
                await offers.send(self._snapshot(group, index, lease.slot, lease.lease, digest))
        await store.drain(600)
        assert store.statistics().refused == 0, store.statistics().refusals
        return time.perf_counter() - started

    async def restore_all(
        self,
        _: Store,
        submissions: Outbox[ToStore],
        __: Outbox[Offer],
        admissions: Inbox[ToEngine],
    ) -> tuple[float, int]:
        """Restore the prefix; return the seconds and the bytes that the store reports."""
        started = time.perf_counter()
        await submissions.send(self.submit)
        while isinstance(message := await admissions.receive(), Restore):
            self.restore.give(message.slot, message.lease)
        assert isinstance(message, Admit)
        assert message.prefix_tokens == len(self.submit.chain) * BLOCK
        return time.perf_counter() - started, message.restored.bytes

    def _snapshot(
        self, group: LayerGroup, index: int, slot: int, lease: int, digest: bytes
    ) -> Snapshot:
        submit = self.submit
        return Snapshot(
            request_id=0,
            group=group.index,
            first_token=index * BLOCK,
            chain_hash=submit.chain[index],
            parent=submit.chain[index - 1] if index else submit.root,
            token_ids=submit.token_ids[4 * index * BLOCK : 4 * (index + 1) * BLOCK],
            first_plane=0,
            planes=group.planes,
            last=True,
            slot=slot,
            lease=lease,
            payload_bytes=group.block_bytes(BLOCK),
            payload_xxh3=digest,
        )


def make_submit(tokens: int) -> Submit:
    """Return a request whose whole blocks are all but its last token."""
    packed = pack_tokens(range(tokens + 1))
    return Submit(
        request_id=0,
        token_ids=packed,
        root=ROOT,
        chain=block_chain(FINGERPRINT, ROOT, packed, BLOCK),
        sampling=SamplingParams(),
    )


def plain_read(files: list[Path]) -> float:
    """Read files with readv into one buffer; return the seconds."""
    buffer = memoryview(bytearray(max(file.stat().st_size for file in files)))
    started = time.perf_counter()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.readv(fd, [buffer])
        os.close(fd)
    return time.perf_counter() - started


def plain_write(sizes: list[int], folder: Path) -> float:
    """Write files of these sizes, renamed into place; return the seconds."""
    data = memoryview(os.urandom(max(sizes)))
    started = time.perf_counter()
    for number, size in enumerate(sizes):
        path = folder / f"{number}.tmp"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(fd, [data[:size]])
        os.close(fd)
        path.rename(folder / f"{number}")
    return time.perf_counter() - started


def restored_files(folder: Path, layout: KvLayout, submit: Submit) -> list[Path]:
    """Return the files that a restore of the whole prefix reads."""
    boundary = len(submit.chain) * BLOCK
    return [
        folder / _identity(submit, group, index).path
        for group in layout.groups
        for index in layout.blocks_for(group, boundary)
    ]


def _identity(submit: Submit, group: LayerGroup, index: int) -> BlockIdentity:
    tokens = submit.token_ids[4 * index * BLOCK : 4 * (index + 1) * BLOCK]
    parent = submit.chain[index - 1] if index else submit.root
    name = submit.chain[index]
    return BlockIdentity(FINGERPRINT, GUARD, group, BLOCK, index * BLOCK, name, parent, tokens)


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Spill and restore one prefix, each beside the plain operation on the same bytes."""
    layout, submit = SHAPES["gemma-3-270m"], make_submit(options.tokens)
    spill: list[float] = []
    write: list[float] = []
    restore: list[float] = []
    read: list[float] = []
    moved = 0
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder, plain = Path(name) / "root", Path(name) / "plain"
            plain.mkdir()
            bench = Bench(layout, submit)
            spill.append(anyio.run(bench.run, folder, bench.offer_all))
            every = sorted(folder.glob("v1/*/*/*/*.safetensors"))
            write.append(plain_write([file.stat().st_size for file in every], plain))
            files = restored_files(folder, layout, submit)
            plain_read(files)
            for _ in range(options.repeats):
                read.append(plain_read(files))
                seconds, moved = anyio.run(bench.run, folder, bench.restore_all)
                restore.append(seconds)
    return {
        "restore_gb_s": _figure([moved / one / 1e9 for one in restore]),
        "read_gb_s": _figure([moved / one / 1e9 for one in read]),
        "restore_ratio": round(statistics.median(read) / statistics.median(restore), 3),
        "spill_s": _figure(spill),
        "write_s": _figure(write),
        "spill_ratio": round(statistics.median(write) / statistics.median(spill), 3),
    }


def measure_bytes() -> dict[str, float]:
    """Whole files against the least bytes, for prefixes of three lengths of two shapes."""
    found = {}
    for name, layout in SHAPES.items():
        for tokens in (4096, 16384, 32768):
            submit = make_submit(tokens)
            whole = sum(
                block.header_bytes() + block.payload_bytes
                for group in layout.groups
                for block in [_identity(submit, group, 0)] * len(layout.blocks_for(group, tokens))
            )
            found[f"{name} {tokens}"] = round(whole / layout.minimum_bytes(tokens), 5)
    return found


def measure_open(count: int, folder: str | None) -> dict[str, Any]:
    """Open a root of many blocks, with and without its journal; the files are sparse."""
    group = SHAPES["gemma-3-270m"].full_groups[0]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name)
        for chain in range(count // 64):
            submit = make_submit(0)
            packed = pack_tokens([chain] * BLOCK * 64)
            names = block_chain(FINGERPRINT, ROOT, packed, BLOCK)
            submit = Submit(
                request_id=0, token_ids=packed, root=ROOT, chain=names, sampling=SamplingParams()
            )
            for index in range(64):
                block = _identity(submit, group, index)
                file = path / block.path
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as out:
                    out.write(block.header(bytes(16)))
                    out.truncate(block.header_bytes() + block.payload_bytes)
        cold, _ = _open(path)
        warm = [_open(path)[0] for _ in range(5)]
        tracemalloc.start()
        _, blocks = _open(path)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        shutil.rmtree(path)
        path.mkdir()
    return {
        "blocks": blocks,
        "without_journal_s": round(cold, 3),
        "with_journal_s": _figure(warm),
        "memory_bytes_per_block": round(held / blocks),
    }


async def measure_offer(layout: KvLayout) -> dict[str, Any]:
    """Offer blocks of every group one at a time, as the engine does; nobody writes them."""
    submit = make_submit(64 * BLOCK)
    slot = min(SLOT_BYTES, max(group.block_bytes(BLOCK) for group in layout.groups))
    parts = sum(len(group.parts(BLOCK, slot)) for group in layout.groups)
    pool = StagingPool("offer", parts, slot)
    outbox, inbox = channel("offers", Offer, 64)
    sequence: Any = SimpleNamespace(
        id=0, offers_late=False, offering=True, offered=0, refused=0, admit=submit
    )
    sequence.wants = lambda group, block: True
    offers = Offers(layout, pool)
    checksum: list[float] = []
    rest: list[float] = []
    for block in range(32):
        started = time.perf_counter()
        offers.prepare(sequence, range(block, block + 1), 64)
        planes = offers.planes()
        before = time.perf_counter()
        digests = [xxhash.xxh3_128_digest(one.payload) for one in planes]
        after = time.perf_counter()
        offers.send(digests, {}, outbox)
        seconds = time.perf_counter() - started
        if block:  # the first touches the slots
            checksum.append((after - before) * 1e3 / len(layout.groups))
            rest.append((seconds - (after - before)) * 1e3 / len(layout.groups))
        for _ in planes:
            message = await inbox.receive()
            assert isinstance(message, Snapshot)
            pool.give(message.slot, message.lease)
    assert not sequence.refused
    return {"slots_and_message_ms": _figure(rest), "checksum_ms": _figure(checksum)}


_ROOTS: list[Any] = []


def _open(path: Path) -> tuple[float, int]:
    started = time.perf_counter()
    options = RootOptions(token=os.urandom(16).hex(), bytes_max=LIMIT)
    root = open_spill_root(path, LIMIT, options)
    seconds, count = time.perf_counter() - started, root.index.count
    root.close()
    _ROOTS[:] = [root]  # kept while its memory is looked at
    return seconds, count


def _figure(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {
        "median": round(median, 4),
        "spread": round((max(values) - min(values)) / median, 3),
    }


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary one")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prefix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--open-blocks", type=int, default=50_000)
    options = parser.parse_args()
    report = {
        **measure_speed(options),
        "bytes_ratio": measure_bytes(),
        "offer": {name: anyio.run(measure_offer, layout) for name, layout in SHAPES.items()},
        "open": measure_open(options.open_blocks, options.folder),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
