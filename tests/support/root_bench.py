"""Spill roots, opened and used as a process does it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import xxhash
from millpond.runtime.kv.files import Draft, read_block, temporary_path
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.index import Shelf
from millpond.runtime.kv.root import RootOptions, SpillRoot, open_spill_root

WRITER_SCRIPT = Path(__file__).parents[1] / "runtime" / "kv_writer.py"
_SPEC = importlib.util.spec_from_file_location("kv_writer", WRITER_SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
kv: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kv)
FILE = kv.prompt_blocks(0, 1)[0]
FILE_BYTES = FILE.header_bytes() + FILE.payload_bytes
SLACK = 12_000  # journal of a few blocks


def opened(path: Path, token: str, bytes_max: int = 2**30, **changes: Any) -> SpillRoot:
    options = RootOptions(**({"token": token, "bytes_max": bytes_max} | changes))
    return open_spill_root(path, bytes_max, options)


def shelf_of(root: SpillRoot, block: BlockIdentity) -> Shelf:
    return root.shelf(block.path.rsplit("/", 2)[0])


def draft_of(root: SpillRoot, block: BlockIdentity, number: int = 0) -> Draft:
    payload = memoryview(kv.payload_of(block))
    temporary = temporary_path(block, root.options.token, number)
    return Draft(block, (payload,), xxhash.xxh3_128_digest(payload), temporary, False)


def store(root: SpillRoot, block: BlockIdentity) -> str:
    return root.store(shelf_of(root, block), draft_of(root, block), 0.0) or ""


def has(root: SpillRoot, block: BlockIdentity) -> bool:
    return block.chain_hash in shelf_of(root, block).blocks


def read(root: SpillRoot, block: BlockIdentity) -> bytes:
    buffer = memoryview(bytearray(block.payload_bytes))
    read_block(root.disk, block, buffer)
    return bytes(buffer)


def bytes_under(path: Path) -> int:
    total = 0
    for one in path.rglob("*"):
        try:
            total += one.stat().st_size if one.is_file() else 0
        except FileNotFoundError:
            continue
    return total
