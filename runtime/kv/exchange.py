"""Export and import of a prefix as one file, between machines with the same identity.

    line      ``millpond-prefix-1`` and a newline
    u64       little-endian length of the manifest
    manifest  JSON, see ``Manifest``
    files     the block files, whole, in the manifest's order

Every function blocks.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash
from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.books import path_of
from millpond.runtime.kv.catalog import read_header, verify_file
from millpond.runtime.kv.files import Draft, file_bytes, temporary_path
from millpond.runtime.kv.header import HEADER_BYTES_MAX, BlockIdentity, group_folder, read_identity
from millpond.runtime.kv.index import Block
from millpond.runtime.kv.root import SpillRoot

MAGIC = b"millpond-prefix-1\n"
MANIFEST_BYTES_MAX = 2**26
BLOCK_BYTES_MAX = 2**33


class ExportedBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of an export: its group's name and its whole size."""

    group: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an export holds.

    fingerprint, guard  hex, of the model and of the machine that made it
    numerics            what that machine says of itself, for people
    blocks              full-attention blocks of a chain first, parents first
    """

    fingerprint: str
    guard: str
    numerics: str
    blocks: tuple[ExportedBlock, ...]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """How much was exported or imported; ``refused``: blocks for which there was no room."""

    blocks: int
    bytes: int
    refused: int = 0


def export_prefix(root: SpillRoot, tip: str, target: Path, numerics: str) -> Exchanged:
    """Write the chain that ends in a block to a new file, verified on the way.

    tip       chain hash of its last block, hex, as ``catalog.summarise`` gives it
    numerics  what this machine says of itself

    Raises BlockError if there is no such chain or one of its blocks is bad, SpillFailed.
    """
    entries = _chain_of(root, bytes.fromhex(tip))
    try:
        first = read_header(root.disk, path_of(entries[0]))
        manifest = Manifest(
            fingerprint=first.fingerprint.hex(),
            guard=first.guard.hex(),
            numerics=numerics,
            blocks=tuple(
                ExportedBlock(group=one.shelf.folder.rpartition("/")[2], bytes=one.bytes)
                for one in entries
            ),
        )
        temporary = target.with_name(f"{target.name}.part")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            data = msgspec.json.encode(manifest)
            file.write(MAGIC + len(data).to_bytes(8, "little") + data)
            for entry in entries:
                _copy_out(root, entry, file)
        temporary.replace(target)
    except OSError as error:
        raise SpillFailed("export to", str(target), error) from error
    return Exchanged(len(entries), sum(one.bytes for one in entries))


def import_prefix(root: SpillRoot, source: Path, fingerprint: bytes, guard: bytes) -> Exchanged:
    """Store the blocks of an export, each verified first.

    fingerprint, guard  of the model on this machine

    Raises BlockError (``mismatch``) with the reason if it was made for another model or on a
    machine whose numbers may differ, (``corrupt``) if it is damaged; SpillFailed.
    """
    try:
        if not stat.S_ISREG(source.stat().st_mode):
            raise OSError(errno.EINVAL, "found no regular file")
        with source.open("rb") as file:
            manifest = _read_manifest(file)
            _check_identity(manifest, fingerprint, guard)
            return _copy_all_in(root, manifest, file)
    except OSError as error:
        raise SpillFailed("import", str(source), error) from error


def _chain_of(root: SpillRoot, tip: bytes) -> list[Block]:
    """Return the full blocks of a chain, first block first, then its sliding blocks."""
    with root.guard:
        shelves = [shelf for shelf in root.index.shelves.values() if tip in shelf.blocks]
        if not shelves:
            raise BlockError(f"chain {tip.hex()}: found no such block")
        space = shelves[0].folder.rpartition("/")[0]
        found: list[Block] = []
        names: set[bytes] = set()
        for shelf in [one for one in shelves if one.is_full]:
            chain: list[Block] = []
            block: Block | None = shelf.blocks[tip]
            while block is not None:
                chain.append(block)
                block = block.parent
            found.extend(reversed(chain))
            names.update(one.chain_hash for one in chain)
        names = names or {tip}
        for folder, shelf in sorted(root.index.shelves.items()):
            if folder.rpartition("/")[0] == space and not shelf.is_full:
                found.extend(one for name, one in shelf.blocks.items() if name in names)
        return found


def _copy_out(root: SpillRoot, entry: Block, file: BinaryIO) -> None:
    verify_file(root.disk, path_of(entry))
    whole = memoryview(bytearray(entry.bytes))
    if root.disk.read_into(path_of(entry), 0, whole) != entry.bytes:
        raise BlockError("a block changed while it was exported")
    file.write(whole)


def _read_manifest(file: BinaryIO) -> Manifest:
    if file.read(len(MAGIC)) != MAGIC:
        raise BlockError("import: found other bytes than the start of an exported prefix")
    size = int.from_bytes(file.read(8), "little")
    if size > MANIFEST_BYTES_MAX:
        raise BlockError(f"import: found a manifest of {size} bytes")
    try:
        manifest = msgspec.json.decode(file.read(size), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BlockError("import: found a damaged manifest") from error
    found = os.fstat(file.fileno()).st_size - file.tell()
    expected = sum(entry.bytes for entry in manifest.blocks)
    if found != expected:  # before memory is taken for them
        raise BlockError(f"import: found {found} bytes of blocks, expected {expected}")
    return manifest


def _check_identity(manifest: Manifest, fingerprint: bytes, guard: bytes) -> None:
    if manifest.fingerprint != fingerprint.hex():
        found, expected = manifest.fingerprint[:16], fingerprint.hex()[:16]
        raise BlockError(
            f"import: found blocks of another model, {found}, expected {expected}", "mismatch"
        )
    if manifest.guard != guard.hex():
        raise BlockError(
            "import: the weights, the configuration or the machine's numbers differ; "
            f"it was made by: {manifest.numerics}",
            "mismatch",
        )


def _copy_all_in(root: SpillRoot, manifest: Manifest, file: BinaryIO) -> Exchanged:
    blocks = size = refused = 0
    for number, (block, payload, digest) in enumerate(_incoming(manifest, file)):
        shelf = root.shelf(group_folder(block.fingerprint, block.group.name))
        temporary = temporary_path(block, root.options.token, number)
        draft = Draft(block, (payload,), digest, temporary, root.options.sync)
        if root.store(shelf, draft, 0.0) is not None:
            refused += 1
        else:
            blocks, size = blocks + 1, size + file_bytes(block)
    return Exchanged(blocks, size, refused)


def _incoming(
    manifest: Manifest, file: BinaryIO
) -> Iterator[tuple[BlockIdentity, memoryview, bytes]]:
    """Iterate over verified blocks: identity, payload, payload checksum."""
    for entry in manifest.blocks:
        if not 8 < entry.bytes <= BLOCK_BYTES_MAX:
            raise BlockError(f"import: found a block of {entry.bytes} bytes")
        data = file.read(entry.bytes)
        size = 8 + int.from_bytes(data[:8], "little")
        if len(data) != entry.bytes or size > HEADER_BYTES_MAX:
            raise BlockError("import: the file ends within a block")
        block, checksum = read_identity(data[:size])
        payload = memoryview(data)[size:]
        if len(payload) != block.payload_bytes or xxhash.xxh3_128_digest(payload) != checksum:
            raise BlockError("import: found a damaged block")
        is_expected = (
            block.group.name == entry.group
            and block.fingerprint.hex() == manifest.fingerprint
            and block.guard.hex() == manifest.guard
        )
        if not is_expected:
            raise BlockError("import: found another block than the manifest names", "mismatch")
        yield block, payload, checksum
