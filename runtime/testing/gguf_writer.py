"""Write small GGUF files for tests: whole models of random weights, and headers with any fault.

Only what tests need: values get their GGUF type from their Python type, tensors are float32 or raw
blocks of a named type.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from millpond.codecs.ggml_types import BY_NAME

_KINDS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6}
_KINDS |= {"bool": 7, "uint64": 10, "int64": 11, "float64": 12}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of any type: row-major shape, name of its type, and its bytes as stored."""

    shape: tuple[int, ...]
    type: str
    payload: bytes


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Mapping[str, np.ndarray | RawTensor],
    version: int = 3,
) -> bytes:
    """Return a whole GGUF file.

    metadata  bool, int (u32), float (f32), str, bytes (a string, verbatim), numpy scalars and
              arrays (their own type), lists of str or bytes (array of strings)
    tensors   float32 arrays, or RawTensor
    """
    raw = {name: _raw(tensor) for name, tensor in tensors.items()}
    head = b"GGUF" + struct.pack("<IQQ", version, len(raw), len(metadata))
    pairs = b"".join(string_bytes(key) + value_bytes(value) for key, value in metadata.items())
    table, data = b"", b""
    for name, tensor in raw.items():
        table += tensor_bytes(name, tensor, len(data))
        data += _padded(tensor.payload)
    return _padded(head + pairs + table) + data


def string_bytes(text: str | bytes) -> bytes:
    """A GGUF string: length, then the bytes."""
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def value_bytes(value: object) -> bytes:
    """Return the type and the bytes of one metadata value."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", _STRING) + string_bytes(value)
    if isinstance(value, Sequence):
        strings = b"".join(string_bytes(entry) for entry in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + strings
    if isinstance(value, np.ndarray):
        kind = _KINDS[value.dtype.name]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    if isinstance(value, np.generic):
        number = value
    elif isinstance(value, bool):
        number = np.bool_(value)
    elif isinstance(value, int):
        number = np.uint32(value)
    elif isinstance(value, float):
        number = np.float32(value)
    else:
        raise TypeError(f"metadata value: found {value!r}, expected a number, string or array")
    return struct.pack("<I", _KINDS[number.dtype.name]) + number.tobytes()


def tensor_bytes(name: str, tensor: RawTensor, offset: int) -> bytes:
    """Return one entry of the tensor table."""
    dims = b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
    count = struct.pack("<I", len(tensor.shape))
    kind = struct.pack("<IQ", BY_NAME[tensor.type].number, offset)
    return string_bytes(name) + count + dims + kind


def _raw(tensor: np.ndarray | RawTensor) -> RawTensor:
    if isinstance(tensor, RawTensor):
        return tensor
    return RawTensor(tensor.shape, "F32", tensor.astype("<f4").tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
