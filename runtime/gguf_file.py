"""``GgufFile``: a GGUF on disk, one file or a split set, opened once and read by position.

Invariants

(I1) The files are opened once.  Whatever appears at the same path later does not matter.
(I2) Only the header is mapped, and only while it is parsed; tensor bytes are read with ``preadv``,
     so a file that is cut short under us gives an error and never a SIGBUS.
(I3) Every failure leaves as ModelNotFound or ModelUnreadable, with the path.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import TracebackType
from typing import Self

from millpond.codecs.errors import GgufError
from millpond.codecs.ggml_types import GgmlType
from millpond.codecs.gguf import GgufHeader, parse_header
from millpond.codecs.gguf_values import brief
from millpond.runtime.errors import ModelNotFound, ModelUnreadable

PARTS_MAX = 256  # open files of one model; real sets have fewer than 50
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies.

    shape          row-major: (out, in), outermost first
    part           index of the file that holds it
    offset         first byte in that file
    payload_bytes  length
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    part: int
    offset: int
    payload_bytes: int

    @property
    def rows(self) -> int:
        """Rows of the flattened matrix ``(prod(shape[:-1]), shape[-1])``; 1 for a vector."""
        return self.elements // self.shape[-1]

    @property
    def elements(self) -> int:
        """Count of weights."""
        return self.payload_bytes // self.type.block_bytes * self.type.block_values

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the flattened matrix."""
        return self.payload_bytes // self.rows


class GgufFile:
    """An open model file; a context manager.  ``read`` may be called from any thread.

    path        as given, made absolute
    metadata    of the first part
    tensors     by name, all parts together, in the order of the files
    file_bytes  of all parts
    """

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self.metadata: Mapping[str, object] = parts[0].header.metadata
        self.version = parts[0].header.version
        self.file_bytes = sum(part.file_bytes for part in parts)
        self.tensors: Mapping[str, StoredTensor] = _merge(parts)
        # mutable state, changed only by close
        self._descriptors = [part.descriptor for part in parts]

    def __repr__(self) -> str:
        return f"<GgufFile {self.path.name}, {len(self.tensors)} tensors, {self.file_bytes} bytes>"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Open a GGUF file, and its siblings if it is one part of a split set.

        Raises ModelNotFound (no such file, a directory, not readable) and ModelUnreadable (not a
        valid GGUF, parts that do not belong together).
        """
        whole = Path(path).expanduser().absolute()
        parts = [_open_part(whole)]
        try:
            parts = _with_siblings(whole, parts[0])
            return cls(whole, parts)
        except BaseException:
            for part in parts:
                part.close()
            raise

    def read(self, tensor: StoredTensor, first_byte: int, buffer: memoryview) -> None:
        """Fill the buffer with the tensor's bytes from ``first_byte`` on.

        Raises ModelUnreadable if the file ends before or the system refuses.
        """
        if first_byte + len(buffer) > tensor.payload_bytes:
            raise ValueError(f"{tensor.name}: a range outside the tensor")
        descriptor, done = self._descriptors[tensor.part], 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor, [buffer[done:]], tensor.offset + first_byte + done)
            except OSError as error:
                raise ModelUnreadable(f"{self.path}: {tensor.name}: {error.strerror}") from error
            if not count:
                raise ModelUnreadable(
                    f"{self.path}: {tensor.name}: found {done} bytes, expected {len(buffer)}: "
                    "the file became shorter while it was read"
                )
            done += count

    def close(self) -> None:
        """Close the files; a later ``read`` raises ModelUnreadable.  Closing again does nothing."""
        descriptors = [number for number in self._descriptors if number >= 0]
        self._descriptors = [-1] * len(self._descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Part:
    """One open file and its header."""

    def __init__(self, path: Path, descriptor: int, header: GgufHeader, file_bytes: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.header, self.file_bytes = header, file_bytes

    def close(self) -> None:
        os.close(self.descriptor)

    def number(self, key: str) -> int | None:
        """Return a ``split.*`` number, None if absent; raises ModelUnreadable on another type."""
        value = self.header.metadata.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ModelUnreadable(f"{self.path}: {key}: found {brief(value)}, expected an integer")


def _open_part(path: Path) -> _Part:
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFound(f"{path}: {reason}") from error
    try:
        return _parse_part(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _parse_part(path: Path, descriptor: int) -> _Part:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise ModelNotFound(f"{path}: found a directory, expected a GGUF file")
    if not stat.S_ISREG(status.st_mode):
        raise ModelNotFound(f"{path}: found no regular file, expected a GGUF file")
    size = status.st_size
    try:
        if not size:
            raise GgufError("not a GGUF file: it is empty")
        with mmap(descriptor, size, access=ACCESS_READ) as mapped:
            return _Part(path, descriptor, parse_header(mapped, size), size)
    except (GgufError, OSError) as error:
        raise ModelUnreadable(f"{path}: {error}") from error


def _with_siblings(path: Path, given: _Part) -> list[_Part]:
    """Return all parts of the set that ``given`` belongs to, in order; it alone if it is whole."""
    count = given.number("split.count")
    if count is None or count <= 1:
        return [given]
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelUnreadable(
            f"{path}: found one part of {count} (split.count), "
            f"expected a name that ends in -00001-of-{count:05d}.gguf"
        )
    if count > PARTS_MAX:
        raise ModelUnreadable(f"{path}: found {count} parts, expected at most {PARTS_MAX}")
    parts: list[_Part] = []
    try:
        for number in range(1, count + 1):
            sibling = path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
            parts.append(given if sibling == path else _open_sibling(sibling, count))
        _check_set(parts)
    except BaseException:
        for part in parts:
            if part is not given:
                part.close()
        raise
    return parts


def _open_sibling(path: Path, count: int) -> _Part:
    try:
        return _open_part(path)
    except ModelNotFound as error:
        raise ModelNotFound(f"one of {count} parts is missing: {error}") from error


def _check_set(parts: list[_Part]) -> None:
    tensors = sum(len(part.header.tensors) for part in parts)
    for index, part in enumerate(parts):
        expected = (("split.count", len(parts)), ("split.no", index))
        for key, number in expected:
            if part.number(key) != number:
                raise ModelUnreadable(
                    f"{part.path}: {key}: found {part.number(key)}, expected {number}"
                )
        total = part.number("split.tensors.count")
        if total is not None and total != tensors:
            raise ModelUnreadable(
                f"{part.path}: split.tensors.count: found {total}, "
                f"expected {tensors}, the tensors of all parts"
            )


def _merge(parts: list[_Part]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for index, part in enumerate(parts):
        for info in part.header.tensors:
            if info.name in tensors:
                raise ModelUnreadable(
                    f"{part.path}: tensor {info.name!r}: found it in two parts, expected in one"
                )
            tensors[info.name] = StoredTensor(
                name=info.name,
                type=info.type,
                shape=info.shape,
                part=index,
                offset=info.offset,
                payload_bytes=info.payload_bytes,
            )
    return tensors
