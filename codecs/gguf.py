"""GGUF header → metadata and tensor table.  Pure and bounded; every byte is untrusted.

Invariants

(I1) A count or length is compared with the bytes that remain before anything is allocated for it,
     and what becomes Python objects has a bound of its own (``GgufLimits``): memory stays below
     twice the file and 100 MB.
(I2) Whatever is wrong with the bytes raises GgufError, with found and expected; nothing else.
(I3) Nothing returned refers to the buffer: it may be unmapped afterwards.

Layout, little-endian, versions 2 and 3 alike:

    "GGUF" · version u32 · tensors u64 · pairs u64
    pairs *   (key string · value type u32 · value)      string = length u64 · UTF-8 bytes
    tensors * (name string · n u32 · n dims u64, innermost first · type u32 · offset u64)
    padding to ``general.alignment`` (32), then the data; offsets count from there

Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from mmap import mmap

from millpond.codecs.errors import GgufError
from millpond.codecs.ggml_types import BY_NUMBER, GgmlType
from millpond.codecs.gguf_values import UINT32, Cursor, GgufLimits, brief, read_value, utf8

__all__ = ["GgufHeader", "GgufLimits", "TensorInfo", "parse_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT_DEFAULT = 32
DIMENSIONS_MAX = 4
ELEMENTS_MAX = 2**63 - 1
# The least that one entry can take: an empty key, its type and one byte; an empty name, one dim.
_PAIR_BYTES_MIN, _TENSOR_BYTES_MIN = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One entry of the tensor table.

    shape          row-major: (out, in), outermost first
    offset         first byte, counted from the start of the file
    payload_bytes  length
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What stands before the data.

    metadata     int, float, bool, str (bytes where not UTF-8), numpy arrays of numbers or bools,
                 lists of bytes for arrays of strings, lists for arrays of arrays
    tensors      in the order of the file
    data_offset  first byte of the data
    """

    version: int
    metadata: dict[str, object]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int


def parse_header(
    buffer: bytes | memoryview | mmap, file_bytes: int, limits: GgufLimits | None = None
) -> GgufHeader:
    """Parse the header that ``buffer`` starts with.

    buffer      the file, or as much of its start as holds the header
    file_bytes  length of the whole file; tensors must lie inside

    Raises GgufError on any violation.
    """
    cursor = Cursor(buffer, limits or GgufLimits())
    version = _version(cursor)
    tensors, pairs = cursor.u64("tensor count"), cursor.u64("metadata count")
    cursor.check_count("tensors", tensors, cursor.limits.tensors_max, _TENSOR_BYTES_MIN)
    cursor.check_count("metadata pairs", pairs, cursor.limits.metadata_max, _PAIR_BYTES_MIN)
    metadata, alignment = _metadata(cursor, pairs)
    table = [_tensor(cursor) for _ in range(tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    placed = _place(table, data_offset, alignment, file_bytes)
    return GgufHeader(
        version=version,
        metadata=metadata,
        tensors=placed,
        data_offset=data_offset,
        alignment=alignment,
    )


def _version(cursor: Cursor) -> int:
    start = cursor.take(4, "magic")
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != MAGIC:
        raise GgufError(f"not a GGUF file: found magic {magic!r}, expected {MAGIC!r}")
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise GgufError("byte order: found big-endian, expected little-endian")
    raise GgufError(f"GGUF version: found {version}, expected 2 or 3")


def _metadata(cursor: Cursor, pairs: int) -> tuple[dict[str, object], int]:
    metadata: dict[str, object] = {}
    alignment = ALIGNMENT_DEFAULT
    for index in range(pairs):
        raw = cursor.text(f"metadata key {index}", cursor.limits.key_bytes_max)
        key = utf8(raw, f"metadata key {index}")
        if key in metadata:
            raise GgufError(f"metadata key {brief(key)}: found it twice, expected it once")
        kind = cursor.u32(f"type of {brief(key)}")
        metadata[key] = read_value(cursor, kind, brief(key))
        if key == ALIGNMENT_KEY:
            alignment = _alignment(kind, metadata[key])
    return metadata, alignment


def _alignment(kind: int, value: object) -> int:
    if kind != UINT32 or not isinstance(value, int):
        raise GgufError(f"{ALIGNMENT_KEY}: found value type {kind}, expected {UINT32} (u32)")
    if value < 1 or value & (value - 1):
        raise GgufError(f"{ALIGNMENT_KEY}: found {value}, expected a power of two")
    return value


def _tensor(cursor: Cursor) -> TensorInfo:
    name = utf8(cursor.text("tensor name", cursor.limits.name_bytes_max), "tensor name")
    what = f"tensor {name!r}"
    count = cursor.u32(f"dimensions of {what}")
    if not 1 <= count <= DIMENSIONS_MAX:
        raise GgufError(f"{what}: found {count} dimensions, expected 1 to {DIMENSIONS_MAX}")
    shape = tuple(cursor.u64(f"dimensions of {what}") for _ in range(count))[::-1]
    number, offset = cursor.u32(f"type of {what}"), cursor.u64(f"offset of {what}")
    kind = BY_NUMBER.get(number)
    if kind is None:
        raise GgufError(f"{what}: found unknown tensor type {number}")
    elements = 1
    for size in shape:
        elements *= size
    if not 1 <= elements <= ELEMENTS_MAX:
        raise GgufError(f"{what}: found shape {shape}, expected 1 to 2^63 - 1 elements")
    if shape[-1] % kind.block_values:
        raise GgufError(
            f"{what}: found rows of {shape[-1]}, "
            f"expected a multiple of {kind.block_values}, the block of {kind.name}"
        )
    payload_bytes = elements // kind.block_values * kind.block_bytes
    return TensorInfo(name=name, type=kind, shape=shape, offset=offset, payload_bytes=payload_bytes)


def _place(
    table: list[TensorInfo], data_offset: int, alignment: int, file_bytes: int
) -> tuple[TensorInfo, ...]:
    """Make offsets count from the start of the file; no tensor may leave it or overlap."""
    names: set[str] = set()
    placed: list[TensorInfo] = []
    for info in table:
        if info.name in names:
            raise GgufError(f"tensor {info.name!r}: found it twice, expected it once")
        names.add(info.name)
        if info.offset % alignment:
            raise GgufError(
                f"tensor {info.name!r}: found offset {info.offset}, "
                f"expected a multiple of {alignment}"
            )
        end = data_offset + info.offset + info.payload_bytes
        if end > file_bytes:
            raise GgufError(
                f"tensor {info.name!r}: found a file of {file_bytes} bytes, expected {end}: "
                "the file is truncated or the offset is wrong"
            )
        placed.append(
            TensorInfo(
                name=info.name,
                type=info.type,
                shape=info.shape,
                offset=data_offset + info.offset,
                payload_bytes=info.payload_bytes,
            )
        )
    _check_overlaps(placed)
    return tuple(placed)


def _check_overlaps(placed: list[TensorInfo]) -> None:
    ordered = sorted(placed, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        end = before.offset + before.payload_bytes
        if after.offset < end:
            raise GgufError(
                f"tensor {after.name!r}: found offset {after.offset}, expected {end} or more: "
                f"it overlaps {before.name!r}"
            )
