"""Opening model files: one clear error per fault, split sets as one, the file once opened stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from millpond.runtime.errors import ModelError, ModelNotFound, ModelUnreadable
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.tensor_digest import combined_digest, tensor_digests
from millpond.runtime.testing.gguf_writer import gguf_bytes

TENSORS = {f"t{index}": np.full(40, index, np.float32) for index in range(5)}


def digest(file: GgufFile) -> str:
    return combined_digest(file.tensors, tensor_digests(file))


def write_split(folder: Path, cuts: tuple[int, ...] = (2, 3), **changes: object) -> list[Path]:
    names, paths = list(TENSORS), []
    bounds = (0, *cuts, len(names))
    count = len(bounds) - 1
    for index in range(count):
        metadata = {
            "split.no": np.uint16(index),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(len(names)),
        }
        if not index:
            metadata |= {"general.name": "split model"}
        held = {name: TENSORS[name] for name in names[bounds[index] : bounds[index + 1]]}
        paths.append(folder / f"model-{index + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(gguf_bytes(metadata | changes, held))
    return paths


def whole(folder: Path) -> Path:
    path = folder / "whole.gguf"
    path.write_bytes(gguf_bytes({"general.name": "whole"}, TENSORS))
    return path


def test_the_bytes_of_a_tensor_are_read_by_position(tmp_path: Path) -> None:
    with GgufFile.open(whole(tmp_path)) as file:
        buffer = memoryview(bytearray(80))
        file.read(file.tensors["t3"], 40, buffer)
        assert buffer.tobytes() == TENSORS["t3"].tobytes()[40:120]
        with pytest.raises(ValueError, match=r"outside the tensor"):
            file.read(file.tensors["t3"], 81, buffer)


def test_a_split_set_loads_as_one_whichever_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    with GgufFile.open(whole(tmp_path)) as file:
        expected = digest(file)
    for path in paths:
        with GgufFile.open(path) as file:
            assert list(file.tensors) == list(TENSORS)
            assert file.metadata["general.name"] == "split model"
            assert file.file_bytes == sum(one.stat().st_size for one in paths)
            assert digest(file) == expected


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelNotFound, match=r"one of 3 parts is missing: .*-00002-of-00003.gguf"):
        GgufFile.open(paths[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.count": np.uint16(4)}, "found one part of 4"),
        ({"split.no": np.uint16(0)}, "split.no: found 0, expected 1"),
        ({"split.tensors.count": np.int32(9)}, "split.tensors.count: found 9, expected 5"),
        ({"split.count": "3"}, "split.count: found '3', expected an integer"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    paths = write_split(tmp_path, **changes)
    with pytest.raises(ModelUnreadable, match=message):
        GgufFile.open(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, (5, 5))
    metadata = {"split.no": np.uint16(1), "split.count": np.uint16(3)}
    paths[1].write_bytes(gguf_bytes(metadata, {"t0": TENSORS["t0"]}))
    for path, number in ((paths[0], 0), (paths[2], 2)):
        held = TENSORS if not number else {}
        both = metadata | {"split.no": np.uint16(number)}
        path.write_bytes(gguf_bytes(both, held))
    with pytest.raises(ModelUnreadable, match=r"'t0': found it in two parts"):
        GgufFile.open(paths[0])


def test_a_part_under_a_name_without_numbers_is_refused(tmp_path: Path) -> None:
    path = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelUnreadable, match=r"expected a name that ends in -00001-of-00003.gguf"):
        GgufFile.open(path)


def _missing(folder: Path) -> Path:
    return folder / "none.gguf"


def _under_a_file(folder: Path) -> Path:
    return whole(folder) / "x"


def _nul(folder: Path) -> Path:
    return folder / "a\0b"


def _long(folder: Path) -> Path:
    return folder / ("x" * 300)


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


@pytest.mark.parametrize("make", [_missing, Path, _under_a_file, _nul, _long, _fifo])
def test_what_is_no_file_is_not_found(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(ModelNotFound, match=r"^/.*: "):
        GgufFile.open(make(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file: it is empty"),
        (b"PK\3\4" + bytes(100), "not a GGUF file: found magic"),
        (gguf_bytes({"a": 1}, TENSORS)[:-1], "the file is truncated"),
        (gguf_bytes({"a": 1}, TENSORS)[:30], "the file is truncated"),
    ],
)
def test_what_is_no_gguf_is_unreadable_and_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnreadable, match=f"bad.gguf: .*{message}"):
        GgufFile.open(path)


def test_no_descriptor_leaks_when_opening_fails(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[2].write_bytes(b"GGUF")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for path in (paths[0], tmp_path / "bad.gguf", tmp_path):
        with pytest.raises(ModelError):
            GgufFile.open(path)
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after == before


def test_a_closed_file_refuses_to_read(tmp_path: Path) -> None:
    file = GgufFile.open(whole(tmp_path))
    file.close()
    file.close()
    with pytest.raises(ModelUnreadable, match=r"t0"):
        file.read(file.tensors["t0"], 0, memoryview(bytearray(4)))


def test_the_digest_sees_every_byte_name_type_and_shape(tmp_path: Path) -> None:
    changed = {
        "value": TENSORS | {"t1": TENSORS["t1"] + np.float32(1e-6)},
        "shape": TENSORS | {"t1": TENSORS["t1"].reshape(2, 20)},
        "name": {("u" if name == "t1" else name): one for name, one in TENSORS.items()},
        "fewer": {name: one for name, one in TENSORS.items() if name != "t1"},
    }
    seen = set()
    for index, tensors in enumerate([TENSORS, *changed.values()]):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(gguf_bytes({"general.name": str(index)}, tensors))
        with GgufFile.open(path) as file:
            seen.add(digest(file))
    assert len(seen) == 1 + len(changed)
    (tmp_path / "order.gguf").write_bytes(gguf_bytes({}, dict(reversed(TENSORS.items()))))
    with GgufFile.open(tmp_path / "order.gguf") as file:
        assert digest(file) in seen
