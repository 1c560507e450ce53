"""Rows of a stored tensor → the bytes that a staging slot carries, hashed on the way.

Runs on a worker thread; blocks.  The bytes that are hashed are the bytes that are converted: they
are read once, into a private buffer, so a file that changes under us cannot pass the digest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from millpond.codecs.fingerprint import NumericsIdentity
from millpond.codecs.quants import dequantise
from millpond.codecs.repack import REPACKED, PackedParts, packed_bytes, repack
from millpond.runtime.gguf_file import GgufFile, StoredTensor
from millpond.runtime.tensor_types import encoding_of

CHUNK_VALUES = 2**17  # read and hashed at once; whole blocks, small enough for the cache


class Hash(Protocol):
    """What ``hashlib`` makes."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Some rows of a tensor's flattened matrix, and the encoding they are staged in.

    encoding  ``f32`` or ``q<bits>g32``
    """

    tensor: StoredTensor
    encoding: str
    first_row: int
    rows: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of these rows as staged."""
        return self.rows * staged_row_bytes(self.tensor, self.encoding)


def staged_row_bytes(tensor: StoredTensor, encoding: str) -> int:
    """Bytes of one row as staged."""
    columns = tensor.shape[-1]
    if encoding == "f32":
        return 4 * columns
    return packed_bytes(columns, REPACKED[tensor.type.name])


def held_weight_bytes(
    tensors: Mapping[str, StoredTensor], needed: Collection[str], numerics: NumericsIdentity
) -> int:
    """Return the bytes that the needed tensors take on the device; nothing is read."""
    width = 4 if numerics.compute_dtype == "float32" else 2
    total = 0
    for name in needed:
        tensor = tensors[name]
        encoding = encoding_of(tensor, numerics.weight_form)
        if encoding == "f32":
            total += width * tensor.elements
        else:
            columns = tensor.shape[-1]
            total += tensor.elements // columns * staged_row_bytes(tensor, encoding)
    return total


def stage_rows(file: GgufFile, rows: RowRange, buffer: memoryview, digest: Hash) -> None:
    """Read rows, hash them as stored, and write them as staged.

    buffer  exactly ``rows.payload_bytes``
    digest  gets the stored bytes of the rows, in order

    Raises ModelUnreadable if the file cannot be read.
    """
    tensor, kind = rows.tensor, rows.tensor.type
    values = rows.rows * tensor.shape[-1]
    first_byte = rows.first_row * tensor.row_bytes
    write = _writer(rows, values, buffer)
    scratch = memoryview(bytearray(_stored_bytes(tensor, min(values, CHUNK_VALUES))))
    for start in range(0, values, CHUNK_VALUES):
        count = min(CHUNK_VALUES, values - start)
        raw = scratch[: _stored_bytes(tensor, count)]
        file.read(tensor, first_byte + start // kind.block_values * kind.block_bytes, raw)
        digest.update(raw)
        write(raw, start, count)


class _Write(Protocol):
    def __call__(self, raw: memoryview, start: int, count: int) -> None: ...


def _writer(rows: RowRange, values: int, buffer: memoryview) -> _Write:
    kind = rows.tensor.type
    if rows.encoding == "f32":
        numbers = np.frombuffer(buffer, np.float32)

        def write_dense(raw: memoryview, start: int, count: int) -> None:
            dequantise(kind, raw, numbers[start : start + count])

        return write_dense
    bits = REPACKED[kind.name]
    parts = PackedParts.inside(buffer, values, bits)

    def write_packed(raw: memoryview, start: int, count: int) -> None:
        repack(kind, raw, parts.part(start, count, bits))

    return write_packed


def _stored_bytes(tensor: StoredTensor, values: int) -> int:
    return values // tensor.type.block_values * tensor.type.block_bytes
