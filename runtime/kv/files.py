"""Block files: publish, read and verify, quarantine.  Every function blocks: disk threads only.

Invariants

(I1) A name leads to a whole file or to none: bytes go to a temporary, then it is renamed.
(I2) No byte of a payload is handed on before its checksum was compared, and what is handed on is
     what was hashed: a payload that passes in parts is hashed again part by part.
(I3) A file that is not what its name promises moves to quarantine and is never read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash
from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.sealing import SealedFile, seal, sealed_bytes

QUARANTINE = "quarantine"
TEMP_SUFFIX = ".tmp"
NOTE_SUFFIX = ".json"
PIECE_BYTES = 2**21  # read, then hash while it is still in the processor's cache


@dataclass(frozen=True, slots=True)
class Part:
    """Planes of a block that pass through one staging slot: bytes [start, start + size)."""

    first_plane: int
    planes: int
    start: int
    size: int


def block_parts(block: BlockIdentity, slot_bytes: int) -> tuple[Part, ...]:
    """Cut a block's payload into parts that each fit a staging slot."""
    plane = block.group.plane_bytes(block.block_tokens)
    cuts = block.group.parts(block.block_tokens, slot_bytes)
    return tuple(Part(first, count, first * plane, count * plane) for first, count in cuts)


def temporary_path(block: BlockIdentity, token: str, number: int) -> str:
    """Return the name under which a writer prepares a block: ``<path>.<token>.<number>.tmp``."""
    return f"{block.path}.{token}.{number}{TEMP_SUFFIX}"


def writer_of(name: str) -> str | None:
    """Return the token of the writer of a temporary, None if the name is no temporary's."""
    if not name.endswith(TEMP_SUFFIX):
        return None
    fields = name.removesuffix(TEMP_SUFFIX).split(".")
    return fields[-2] if len(fields) >= 3 else ""


def file_bytes(block: BlockIdentity) -> int:
    """Return the whole size of a block's file."""
    if block.seal is not None:
        return sealed_bytes(block)
    return block.header_bytes() + block.payload_bytes


def check_parts(parts: Sequence[memoryview], digests: Sequence[bytes]) -> bytes:
    """Compare staged parts with their digests; return the xxh3-128 of all of them in a row.

    Raises BlockError if a part is not what was staged.
    """
    for index, (part, digest) in enumerate(zip(parts, digests, strict=True)):
        if xxhash.xxh3_128_digest(part) != digest:
            raise BlockError(f"staged part {index}: found other bytes than its sender hashed")
    if len(parts) == 1:
        return digests[0]
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return whole.digest()


@dataclass(frozen=True, slots=True)
class Draft:
    """A block about to be published.

    parts      its payload, in order
    digest     xxh3-128 of all parts in a row
    temporary  path of the file until it is whole
    sync       durability ``power``: the bytes are synced before the name exists
    """

    block: BlockIdentity
    parts: tuple[memoryview, ...]
    digest: bytes
    temporary: str
    sync: bool


def prepare(disk: Disk, draft: Draft) -> None:
    """Write the temporary (I1).  Raises SpillFailed; the caller removes what may be there then."""
    parts: Sequence[memoryview | bytes] = (draft.block.header(draft.digest), *draft.parts)
    if draft.block.seal is not None:
        parts = seal(draft.block, bytes(parts[0]), _planes(draft))
    try:
        disk.write(draft.temporary, parts, draft.sync)
    except OSError as error:
        raise SpillFailed("write", draft.temporary, error) from error


def _planes(draft: Draft) -> Iterator[memoryview]:
    size = draft.block.group.plane_bytes(draft.block.block_tokens)
    for part in draft.parts:
        whole = part.cast("B")
        for start in range(0, len(whole), size):
            yield whole[start : start + size]


def publish(disk: Disk, draft: Draft) -> None:
    """Give the temporary its name.

    Raises SpillFailed; the file may then be under either name, and the caller removes both.
    """
    try:
        disk.rename(draft.temporary, draft.block.path, draft.sync)
    except OSError as error:
        raise SpillFailed("rename", draft.temporary, error) from error


def discard(disk: Disk, path: str) -> bool:
    """Remove a file if that is possible; True iff there is none afterwards."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def read_block(disk: Disk, block: BlockIdentity, payload: memoryview) -> None:
    """Read a whole payload and verify it (I2).

    Raises BlockError, FileNotFoundError or OSError; the buffer's contents are then meaningless.
    """
    assert len(payload) == block.payload_bytes, "the slot holds the whole payload"
    if block.seal is not None:
        parts = block_parts(block, len(payload))
        verify_block(disk, block, parts, payload)
        return
    header, beyond = bytearray(block.header_bytes()), memoryview(bytearray(1))
    digest = xxhash.xxh3_128()
    for start in range(0, len(payload), PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        is_last = start + PIECE_BYTES >= len(payload)
        front = () if start else (memoryview(header),)
        back = (beyond,) if is_last else ()
        offset = start + len(header) if start else 0
        found = disk.read_into(block.path, offset, *front, piece, *back)
        _check_length(block, found, sum(map(len, front)) + len(piece), is_last)
        digest.update(piece)
    _check_digest(block.check_header(bytes(header)), digest.digest())


def verify_block(
    disk: Disk, block: BlockIdentity, parts: Sequence[Part], scratch: memoryview
) -> tuple[bytes, ...]:
    """Verify a payload larger than a slot by streaming it; return the xxh3-128 of each part.

    Raises as ``read_block``.
    """
    if block.seal is not None:
        return _verify_sealed(disk, block, parts, scratch)
    header = bytearray(block.header_bytes())
    found = disk.read_into(block.path, 0, memoryview(header))
    _check_length(block, found, len(header), False)
    checksum = block.check_header(bytes(header))
    whole, digests = xxhash.xxh3_128(), []
    for part in parts:
        one = xxhash.xxh3_128()
        for start in range(part.start, part.start + part.size, len(scratch)):
            piece = scratch[: min(len(scratch), part.start + part.size - start)]
            count = disk.read_into(block.path, len(header) + start, piece)
            _check_length(block, count, len(piece), False)
            one.update(piece)
            whole.update(piece)
        digests.append(one.digest())
    end = disk.read_into(block.path, len(header) + block.payload_bytes, memoryview(bytearray(1)))
    _check_length(block, file_bytes(block) + end, file_bytes(block), True)
    _check_digest(checksum, whole.digest())
    return tuple(digests)


def read_part(
    disk: Disk, block: BlockIdentity, part: Part, digest: bytes, payload: memoryview
) -> None:
    """Read one part again and compare it with what ``verify_block`` hashed.

    Raises as ``read_block``.
    """
    if block.seal is not None:
        _read_planes(SealedFile(disk, block), block, part, payload)
    else:
        count = disk.read_into(block.path, block.header_bytes() + part.start, payload)
        _check_length(block, count, part.size, False)
    _check_digest(digest, xxhash.xxh3_128_digest(payload))


def _verify_sealed(
    disk: Disk, block: BlockIdentity, parts: Sequence[Part], scratch: memoryview
) -> tuple[bytes, ...]:
    file, whole, digests = SealedFile(disk, block), xxhash.xxh3_128(), []
    for part in parts:
        piece = scratch[: part.size]
        _read_planes(file, block, part, piece)
        whole.update(piece)
        digests.append(xxhash.xxh3_128_digest(piece))
    file.check_end()
    _check_digest(file.checksum, whole.digest())
    return tuple(digests)


def _read_planes(file: SealedFile, block: BlockIdentity, part: Part, target: memoryview) -> None:
    size = block.group.plane_bytes(block.block_tokens)
    for index in range(part.planes):
        file.read_plane(part.first_plane + index, target[index * size : (index + 1) * size])


def _check_length(block: BlockIdentity, found: int, expected: int, is_last: bool) -> None:
    if found < expected:
        raise BlockError(f"{block.group.name}: the file ends early, {expected - found} bytes lack")
    if is_last and found > expected:
        raise BlockError(f"{block.group.name}: found bytes behind the payload")


def _check_digest(expected: bytes, found: bytes) -> None:
    if found != expected:
        raise BlockError(f"payload: found xxh3-128 {found.hex()}, expected {expected.hex()}")


class QuarantineNote(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside a quarantined file.

    path    where it was
    reason  ``corrupt``, ``mismatch`` or ``io_error``
    detail  what was found and expected; nothing of a prompt
    """

    path: str
    reason: str
    detail: str


def quarantine(disk: Disk, path: str, reason: str, detail: str, bytes_max: int) -> int:
    """Set a bad file aside with its reason, oldest out first over ``bytes_max``.

    Returns the bytes that the quarantine now holds.  A file that is gone already is no error.
    Raises OSError if the file can be neither moved nor removed.
    """
    group, name = path.split("/")[-3], path.rsplit("/", 1)[-1]
    stem = f"{QUARANTINE}/{name.partition('.')[0]}-{group}-{reason}"
    note = QuarantineNote(path=path, reason=reason, detail=detail)
    with contextlib.suppress(OSError):  # the note is a help, the move is what counts
        discard(disk, stem + NOTE_SUFFIX)
        disk.write(stem + NOTE_SUFFIX, (msgspec.json.encode(note),), False)
    try:
        disk.rename(path, f"{stem}.safetensors", False)
    except FileNotFoundError:
        discard(disk, stem + NOTE_SUFFIX)
    except OSError:
        discard(disk, stem + NOTE_SUFFIX)
        disk.remove(path)
    return trim_quarantine(disk, bytes_max)


def trim_quarantine(disk: Disk, bytes_max: int) -> int:
    """Remove the oldest quarantined files until the rest fits; return the bytes left."""
    try:
        entries = [entry for entry in disk.scan(QUARANTINE) if not entry.is_folder]
    except FileNotFoundError:
        return 0
    since = {entry.name.rpartition(".")[0]: entry.mtime_ns for entry in entries}
    since |= {
        entry.name.removesuffix(NOTE_SUFFIX): entry.mtime_ns
        for entry in entries
        if entry.name.endswith(NOTE_SUFFIX)
    }
    held = sum(entry.bytes for entry in entries)
    entries.sort(key=lambda entry: (since[entry.name.rpartition(".")[0]], entry.name))
    for entry in entries:
        if held <= bytes_max:
            break
        disk.remove(f"{QUARANTINE}/{entry.name}")
        held -= entry.bytes
    return held
