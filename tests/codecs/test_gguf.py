"""The GGUF parser: reads what is valid, and refuses everything else with GgufError."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from millpond.codecs.errors import GgufError
from millpond.codecs.ggml_types import BY_NAME
from millpond.codecs.gguf import GgufHeader, GgufLimits, parse_header
from millpond.runtime.testing.gguf_writer import (
    RawTensor,
    gguf_bytes,
    string_bytes,
    tensor_bytes,
    value_bytes,
)

WHOLE = {"a": 1, "b": "text", "c": True, "d": [b"x", b"", b"\xff"], "e": np.arange(3.0)}
VECTOR = np.arange(8, dtype=np.float32)
MATRIX = np.arange(64, dtype=np.float32).reshape(2, 32)


def parse(data: bytes, limits: GgufLimits | None = None) -> GgufHeader:
    return parse_header(data, len(data), limits)


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def pair(key: str | bytes, value: bytes) -> bytes:
    return string_bytes(key) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def entry(dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, count: int = -1) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    counted = len(dims) if count < 0 else count
    return string_bytes("t") + struct.pack("<I", counted) + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read_as_written(version: int) -> None:
    data = gguf_bytes(WHOLE, {"v": VECTOR, "m": MATRIX}, version)
    header = parse(data)
    assert header.version == version and header.alignment == 32
    found = dict(header.metadata)
    assert np.array_equal(found.pop("e"), WHOLE["e"])
    assert found == {key: value for key, value in WHOLE.items() if key != "e"}
    vector, matrix = header.tensors
    assert (vector.name, vector.shape, vector.payload_bytes) == ("v", (8,), 32)
    assert (matrix.name, matrix.shape, matrix.type.name) == ("m", (2, 32), "F32")
    assert data[matrix.offset : matrix.offset + matrix.payload_bytes] == MATRIX.tobytes()


def test_nothing_returned_refers_to_the_buffer() -> None:
    data = bytearray(gguf_bytes(WHOLE, {"v": VECTOR}))
    header = parse_header(memoryview(data), len(data))
    data[:] = bytes(len(data))
    assert header.metadata["d"] == [b"x", b"", b"\xff"]
    assert np.array_equal(header.metadata["e"], WHOLE["e"])
    data.clear()  # raises BufferError while a view is alive


def test_a_string_that_is_not_utf8_stays_bytes() -> None:
    assert parse(gguf_bytes({"k": b"\xff"}, {})).metadata == {"k": b"\xff"}


def test_every_scalar_type_is_read() -> None:
    names = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    values = {name: np.dtype(name).type(np.iinfo(name).max) for name in names}
    values |= {"f": np.float32(1.5), "d": np.float64(0.1)}
    assert parse(gguf_bytes(values, {})).metadata == {
        key: one.item() for key, one in values.items()
    }


def test_a_file_without_tensors_may_end_with_its_metadata() -> None:
    data = head(0, 1) + pair("k", value_bytes(1))
    assert parse(data).tensors == ()


def test_the_alignment_of_the_file_counts() -> None:
    pairs = pair("general.alignment", value_bytes(64))
    data = (head(1, 1) + pairs + entry()).ljust(128, b"\0") + VECTOR.tobytes()
    assert parse(data).tensors[0].offset == 128


def test_real_headers_agree_with_the_gguf_package(shared_reference: Path) -> None:
    for path in sorted((shared_reference / "fixtures").glob("*.gguf")):
        header, reader = parse(path.read_bytes()), GGUFReader(path)
        assert len(header.metadata) == len(reader.fields) - 3
        assert header.data_offset == reader.data_offset
        for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
            assert ours.name == theirs.name
            assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
            assert ours.type.name == theirs.tensor_type.name
            assert (ours.offset, ours.payload_bytes) == (theirs.data_offset, theirs.n_bytes)


HUGE = (2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 9, 2**64 - 1)


@pytest.mark.parametrize("huge", HUGE)
def test_a_huge_count_or_length_is_refused_before_anything_is_allocated(huge: int) -> None:
    size = struct.pack("<Q", huge)
    hostile = {
        "tensors": b"GGUF" + struct.pack("<IQQ", 3, huge, 0),
        "pairs": b"GGUF" + struct.pack("<IQQ", 3, 0, huge),
        "key": head(0, 1) + size + b"key",
        "string": head(0, 1) + pair("k", struct.pack("<I", 8) + size + b"text"),
        "name": head(1, 0) + size + bytes(64),
        "strings": head(0, 1) + pair("k", array(8, huge, bytes(64))),
        "a string": head(0, 1) + pair("k", array(8, 1, size)),
        "arrays": head(0, 1) + pair("k", array(9, huge, bytes(64))),
        "dimension": head(1, 0) + entry((huge, huge)) + bytes(256),
        "offset": head(1, 0) + entry(offset=huge // 32 * 32) + bytes(256),
    }
    for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12):
        hostile[f"numbers {kind}"] = head(0, 1) + pair("k", array(kind, huge, bytes(64)))
    for what, data in hostile.items():
        with pytest.raises(GgufError, match=r"found .*"):
            parse(data)
            pytest.fail(what)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic"),
        (b"GGUF", "version"),
        (b"GGML" + bytes(60), "found magic b'GGML', expected b'GGUF'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "found big-endian"),
        (head(0, 0, version=1), "GGUF version: found 1, expected 2 or 3"),
        (head(0, 0, version=99), "GGUF version: found 99"),
        (head(0, 1) + pair(b"\xff", value_bytes(1)), "expected UTF-8"),
        (head(0, 2) + pair("k", value_bytes(1)) * 2, "'k': found it twice"),
        (head(0, 1) + pair("k", struct.pack("<I", 13) + bytes(8)), "found value type 13"),
        (head(0, 1) + pair("k", array(13, 1, bytes(8))), "found element type 13"),
        (head(0, 1) + pair("k", struct.pack("<IB", 7, 2)), "found a bool of 2"),
        (head(0, 1) + pair("k", array(7, 2, b"\1\2")), "found a bool of 2"),
        (head(0, 1) + pair("general.alignment", value_bytes(0)), "found 0, expected a power"),
        (head(0, 1) + pair("general.alignment", value_bytes(7)), "found 7, expected a power"),
        (head(0, 1) + pair("general.alignment", value_bytes("32")), "found value type 8"),
        (
            head(0, 1) + pair("general.alignment", value_bytes(np.uint64(32))),
            "found value type 10",
        ),
        (head(1, 0) + entry(()) + bytes(96), "found 0 dimensions"),
        (head(1, 0) + entry((1,) * 5) + bytes(96), "found 5 dimensions"),
        (head(1, 0) + entry(count=2**32 - 1) + bytes(96), "found 4294967295 dimensions"),
        (head(1, 0) + entry((0,)) + bytes(96), "expected 1 to 2\\^63 - 1 elements"),
        (head(1, 0) + entry((2**32, 2**31)) + bytes(96), "elements"),
        (head(1, 0) + entry(kind=4) + bytes(96), "found unknown tensor type 4"),
        (head(1, 0) + entry(kind=2**31) + bytes(96), "found unknown tensor type"),
        (head(1, 0) + entry((33, 2), kind=8) + bytes(256), "expected a multiple of 32"),
        (head(1, 0) + entry(offset=8) + bytes(96), "expected a multiple of 32"),
        (head(1, 0) + entry(offset=2**64 - 32) + bytes(96), "the file is truncated"),
        (head(1, 0) + entry(), "the file is truncated"),
        (head(2, 0) + entry() * 2 + bytes(128), "'t': found it twice"),
    ],
)
def test_a_broken_header_is_refused_with_found_and_expected(data: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=message):
        parse(data)


def test_overlapping_tensors_are_refused() -> None:
    table = b"".join(
        tensor_bytes(name, RawTensor((2, 8), "F32", b""), offset)
        for name, offset in (("one", 32), ("two", 0))
    )
    with pytest.raises(GgufError, match=r"'one'.*overlaps 'two'"):
        parse(head(2, 0) + table + bytes(256))


def test_arrays_nest_to_their_limit_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        inner = struct.pack("<IQ", 4, 0)
        for _ in range(depth):
            inner = struct.pack("<IQ", 9, 1) + inner
        return head(0, 1) + pair("k", struct.pack("<I", 9) + inner)

    assert parse(nested(2)).metadata["k"] == [[pytest.approx(np.empty(0))]]
    for depth in (3, 5000):
        with pytest.raises(GgufError, match="nested deeper than 2"):
            parse(nested(depth))


def test_the_limits_hold() -> None:
    text = head(0, 2) + pair("k", value_bytes("x" * 60)) + pair("l", value_bytes("x" * 60))
    strings = head(0, 2) + pair("k", value_bytes([b""] * 6)) + pair("l", value_bytes([b""] * 6))
    for data, limits, message in (
        (text, GgufLimits(text_bytes_max=100), "found 122 bytes of text so far"),
        (text, GgufLimits(metadata_max=1), "found a count of 2, expected at most 1"),
        (strings, GgufLimits(objects_max=10), "found 12 array elements"),
        (head(1, 0) + entry() + bytes(96), GgufLimits(tensors_max=0), "found a count of 1"),
        (head(1, 0) + entry() + bytes(96), GgufLimits(name_bytes_max=0), "found 1 bytes"),
        (text, GgufLimits(key_bytes_max=0), "found 1 bytes, expected at most 0"),
    ):
        with pytest.raises(GgufError, match=message):
            parse(data, limits)


def test_every_truncation_is_refused() -> None:
    data = gguf_bytes(WHOLE, {"v": VECTOR, "m": MATRIX})
    for size in range(len(data)):
        with pytest.raises(GgufError):
            parse(data[:size])


def test_every_flipped_bit_is_refused_or_read_as_another_valid_header() -> None:
    data = gguf_bytes(WHOLE, {"v": VECTOR, "m": MATRIX})
    refused = 0
    for position in range(8 * parse(data).data_offset):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            parse(bytes(flipped))
        except GgufError:
            refused += 1
    assert refused > parse(data).data_offset  # most bits of a small header are structure


def test_block_sizes_agree_with_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for name, kind in BY_NAME.items():
        theirs = GGMLQuantizationType[name]
        assert kind.number == theirs.value
        if name != "Q8_1":  # the package counts two float32 where ggml stores two float16
            assert (kind.block_values, kind.block_bytes) == GGML_QUANT_SIZES[theirs]
