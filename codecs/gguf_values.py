"""GGUF primitives: a bounds-checked cursor over untrusted bytes, and metadata values.

Invariants: those of ``codecs.gguf``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

import numpy as np
from millpond.codecs.errors import GgufError

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_DTYPES = {kind: np.dtype("<" + code) for kind, code in _SCALARS.items()}
_U64 = struct.Struct("<Q")
SHOWN = 60  # characters of a found value that a message shows
WINDOW_BYTES = 2**18  # copied at once by the loop over strings


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLimits:
    """Bounds of what a header may make us hold; all at once stay below twice the file and 100 MB.

    metadata_max    pairs; real files have less than 100
    tensors_max     tensors; the largest models have a few thousand
    key_bytes_max   bytes of a key, as the specification says
    name_bytes_max  bytes of a tensor name; ggml itself stops at 64
    text_bytes_max  bytes of keys, names and single strings together; decoded text may take four
                    times as much
    objects_max     strings and inner arrays of all arrays together: each becomes an object of
                    about 50 bytes; the largest real vocabulary with its merges has 780,000
    nesting_max     arrays inside arrays; no known file has any
    """

    metadata_max: int = 16_384
    tensors_max: int = 32_768
    key_bytes_max: int = 65_535
    name_bytes_max: int = 255
    text_bytes_max: int = 4 * 2**20
    objects_max: int = 1_250_000
    nesting_max: int = 2


class Cursor:
    """Reads forward through the buffer; every read checks its bounds first (I1)."""

    def __init__(self, buffer: bytes | memoryview | mmap, limits: GgufLimits) -> None:
        self.buffer, self.limits = buffer, limits
        self.end = len(buffer)
        # mutable state, changed only by reads
        self.position = 0
        self.text_bytes = 0
        self.objects = 0

    def take(self, size: int, what: str) -> int:
        """Step over ``size`` bytes; return where they begin."""
        start = self.position
        if size > self.end - start:
            raise GgufError(
                f"{what} at byte {start}: found {self.end - start} bytes to the end, "
                f"expected {size}: the file is truncated or the length is wrong"
            )
        self.position = start + size
        return start

    def ahead(self, size: int) -> bytes:
        """Return a copy of the next ``size`` bytes, fewer at the end; steps over nothing."""
        return bytes(self.buffer[self.position : self.position + size])

    def u32(self, what: str) -> int:
        """Read one u32."""
        number: int = _STRUCTS[UINT32].unpack_from(self.buffer, self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """Read one u64."""
        number: int = _U64.unpack_from(self.buffer, self.take(8, what))[0]
        return number

    def scalar(self, kind: int, what: str) -> int | float | bool:
        """Read one number or bool."""
        reader = _STRUCTS[kind]
        number: int | float = reader.unpack_from(self.buffer, self.take(reader.size, what))[0]
        if kind != BOOL:
            return number
        if number not in (0, 1):
            raise GgufError(f"{what}: found a bool of {number}, expected 0 or 1")
        return bool(number)

    def text(self, what: str, bytes_max: int) -> bytes:
        """Return a single string; all of them share ``text_bytes_max``."""
        size = self.u64(f"length of {what}")
        if size > bytes_max:
            raise GgufError(f"{what}: found {size} bytes, expected at most {bytes_max}")
        start = self.take(size, what)
        self.text_bytes += size
        if self.text_bytes > self.limits.text_bytes_max:
            raise GgufError(
                f"{what}: found {self.text_bytes} bytes of text so far, "
                f"expected at most {self.limits.text_bytes_max}"
            )
        return bytes(self.buffer[start : start + size])

    def check_count(self, what: str, count: int, count_max: int, bytes_min: int) -> None:
        """Refuse a count that its bound or the bytes that remain do not allow."""
        if count > count_max:
            raise GgufError(f"{what}: found a count of {count}, expected at most {count_max}")
        fits = (self.end - self.position) // bytes_min
        if count > fits:
            raise GgufError(
                f"{what}: found a count of {count}, expected at most {fits} in the bytes to "
                "the end: the file is truncated or the count is wrong"
            )

    def count_objects(self, what: str, count: int) -> None:
        """Count elements that become Python objects against their bound."""
        self.objects += count
        if self.objects > self.limits.objects_max:
            raise GgufError(
                f"{what}: found {self.objects} array elements that are strings or arrays, "
                f"expected at most {self.limits.objects_max}"
            )


def read_value(cursor: Cursor, kind: int, what: str, depth: int = 0) -> object:
    """Read one metadata value of the value type ``kind``; raises GgufError.

    Returns int, float, bool, str (bytes where not UTF-8), a numpy array of numbers or bools, a
    list of bytes for an array of strings, or a list for an array of arrays.
    """
    if kind in _SCALARS:
        return cursor.scalar(kind, what)
    if kind == STRING:
        raw = cursor.text(what, cursor.limits.text_bytes_max)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw
    if kind == ARRAY:
        return _array(cursor, what, depth)
    raise GgufError(f"{what}: found value type {kind}, expected 0 to 12")


def _array(cursor: Cursor, what: str, depth: int) -> object:
    if depth > cursor.limits.nesting_max:
        raise GgufError(f"{what}: found arrays nested deeper than {cursor.limits.nesting_max}")
    kind, count = cursor.u32(f"element type of {what}"), cursor.u64(f"length of {what}")
    if kind in _SCALARS:
        return _numbers(cursor, kind, count, what)
    if kind == STRING:
        cursor.check_count(what, count, cursor.limits.objects_max, 8)
        cursor.count_objects(what, count)
        return _strings(cursor, count, what)
    if kind == ARRAY:
        cursor.check_count(what, count, cursor.limits.objects_max, 12)
        # An empty numpy array costs about four times a short string.
        cursor.count_objects(what, 4 * count)
        return [_array(cursor, what, depth + 1) for _ in range(count)]
    raise GgufError(f"{what}: found element type {kind}, expected 0 to 12")


def _numbers(cursor: Cursor, kind: int, count: int, what: str) -> np.ndarray:
    dtype = _DTYPES[kind]
    start = cursor.take(count * dtype.itemsize, what)
    if not count:
        return np.empty(0, np.bool_ if kind == BOOL else dtype)
    numbers = np.frombuffer(cursor.buffer, dtype, count, start).copy()
    if kind != BOOL:
        return numbers
    if numbers.max() > 1:
        raise GgufError(f"{what}: found a bool of {numbers.max()}, expected 0 or 1")
    return numbers.view(np.bool_)


def _strings(cursor: Cursor, count: int, what: str) -> list[bytes]:
    """Read an array of strings: the one hot loop, 500,000 turns on a real vocabulary.

    It works on copies of ``WINDOW_BYTES``, because slicing those costs a third of slicing a map.
    """
    read = _U64.unpack_from
    strings: list[bytes] = []
    window, done = b"", 0  # what follows cursor.position, and how much of it was read
    for index in range(count):
        if done + 8 > len(window):
            cursor.position += done
            window, done = cursor.ahead(WINDOW_BYTES), 0
            if len(window) < 8:
                cursor.take(8, f"length of string {index} of {count} in {what}")
        end = done + 8 + read(window, done)[0]
        if end <= len(window):
            strings.append(window[done + 8 : end])
            done = end
            continue
        cursor.position += done + 8
        start = cursor.take(end - done - 8, f"string {index} of {what}")
        strings.append(bytes(cursor.buffer[start : cursor.position]))
        window, done = b"", 0
    cursor.position += done
    return strings


def brief(value: object) -> str:
    """Return a metadata value for an error message: one short line, whatever the value is."""
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)}"
    if isinstance(value, str | bytes) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}…"
    return repr(value)


def utf8(raw: bytes, what: str) -> str:
    """Return the text; raises GgufError if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise GgufError(f"{what}: found {raw[:32]!r}, expected UTF-8") from None
