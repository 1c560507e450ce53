"""Block files: one canonical form; every other byte is refused."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_hash
from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.files import (
    Draft,
    block_parts,
    check_parts,
    file_bytes,
    prepare,
    publish,
    quarantine,
    read_block,
    read_part,
    trim_quarantine,
    verify_block,
    writer_of,
)
from millpond.runtime.kv.header import BlockIdentity, peek
from millpond.runtime.kv.layout import LayerGroup

GROUP = LayerGroup(0, LayerType.FULL, 2, 4, KvDType.F32, (0, 3))


def identity(dtype: KvDType = KvDType.F32, first_token: int = 8, tokens: int = 4) -> BlockIdentity:
    ids = pack_tokens(range(70_000, 70_000 + tokens))
    parent = b"p" * 32
    return BlockIdentity(
        fingerprint=b"f" * 32,
        guard=b"g" * 32,
        group=replace(GROUP, dtype=dtype),
        block_tokens=tokens,
        first_token=first_token,
        chain_hash=chain_hash(b"f" * 32, parent, ids),
        parent=parent,
        token_ids=ids,
    )


def payload_of(block: BlockIdentity) -> bytes:
    return bytes(index * 7 % 251 for index in range(block.payload_bytes))


def write(disk: PosixDisk, block: BlockIdentity) -> Path:
    payload = memoryview(payload_of(block))
    draft = Draft(
        block, (payload,), xxhash.xxh3_128_digest(payload), f"{block.path}.me.0.tmp", False
    )
    prepare(disk, draft)
    publish(disk, draft)
    return disk.root / block.path


def read(disk: PosixDisk, block: BlockIdentity) -> bytes:
    buffer = memoryview(bytearray(block.payload_bytes))
    read_block(disk, block, buffer)
    return bytes(buffer)


@pytest.fixture
def disk(tmp_path: Path) -> PosixDisk:
    return PosixDisk(tmp_path / "root")


@pytest.mark.parametrize("dtype", list(KvDType))
def test_a_block_file_opens_with_the_safetensors_library(disk: PosixDisk, dtype: KvDType) -> None:
    safetensors = pytest.importorskip("safetensors")
    block = identity(dtype)
    path = write(disk, block)
    with safetensors.safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["k", "v"]
        assert file.get_slice("k").get_shape() == [2, 2, 4, 4]
        assert file.get_slice("v").get_dtype() == dtype.value.upper()
        metadata = file.metadata()
        if dtype is not KvDType.BF16:
            rows = np.concatenate([file.get_tensor("k").ravel(), file.get_tensor("v").ravel()])
            assert rows.tobytes() == payload_of(block)
    assert metadata["chain_hash"] == block.chain_hash.hex()
    assert metadata["parent"] == block.parent.hex()
    assert metadata["guard"] == block.guard.hex()
    assert metadata["first_token"] == "8"


def test_what_was_published_reads_back_and_is_private(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    assert read(disk, block) == payload_of(block)
    assert path.stat().st_size == file_bytes(block)
    assert path.stat().st_mode & 0o777 == 0o600
    for folder in path.relative_to(disk.root).parents:
        assert (disk.root / folder).stat().st_mode & 0o777 == 0o700
    assert block.header_bytes() % 64 == 0


def test_the_size_of_a_file_does_not_depend_on_its_position(disk: PosixDisk) -> None:
    sizes = {len(identity(first_token=4 * 10**power).header(bytes(16))) for power in range(15)}
    assert len(sizes) == 1


def test_every_flipped_bit_is_refused(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(whole)):
            byte = whole[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(BlockError):
                read(disk, block)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert read(disk, block) == payload_of(block)


def test_every_truncation_and_every_longer_file_is_refused(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    whole = path.read_bytes()
    for changed in [whole[:size] for size in range(len(whole))] + [whole + b"\0", whole * 2]:
        path.write_bytes(changed)
        with pytest.raises(BlockError):
            read(disk, block)
        with pytest.raises(BlockError):
            verify_block(disk, block, block_parts(block, 128), memoryview(bytearray(128)))


def test_a_whole_block_of_another_identity_is_a_mismatch(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    others = [
        replace(block, guard=b"h" * 32),
        replace(block, parent=b"q" * 32),
        replace(block, token_ids=pack_tokens([1, 2, 3, 4])),
        replace(block, first_token=12),
        replace(block, group=replace(GROUP, index=3)),
    ]
    for other in others:
        target = disk.root / other.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        with pytest.raises(BlockError) as caught:
            read(disk, other)
        assert caught.value.reason == "mismatch", other
        assert "70000" not in str(caught.value)


def test_a_header_that_says_the_same_in_other_bytes_is_corrupt(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    head = json.loads(whole[8 : 8 + size])
    forms = [
        json.dumps(head).encode(),
        json.dumps(dict(reversed(head.items())), separators=(",", ":")).encode(),
        json.dumps(head | {"w": head["v"]}, separators=(",", ":")).encode(),
    ]
    for form in forms:
        if len(form) <= size:
            path.write_bytes(whole[:8] + form.ljust(size) + whole[8 + size :])
            with pytest.raises(BlockError) as caught:
                read(disk, block)
            assert caught.value.reason == "corrupt"


def test_upper_case_checksum_digits_are_corrupt(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    whole = path.read_bytes()
    digits = xxhash.xxh3_128_hexdigest(payload_of(block)).encode()
    path.write_bytes(whole.replace(digits, digits.upper()))
    with pytest.raises(BlockError):
        read(disk, block)


def test_a_block_in_parts_is_verified_whole_and_then_part_by_part(disk: PosixDisk) -> None:
    block = identity()
    path = write(disk, block)
    slot = 2 * block.group.plane_bytes(4)
    parts = block_parts(block, slot)
    assert [(part.first_plane, part.planes) for part in parts] == [(0, 2), (2, 2), (4, 2), (6, 2)][
        : len(parts)
    ]
    digests = verify_block(disk, block, parts, memoryview(bytearray(slot)))
    payload = bytearray()
    for part, digest in zip(parts, digests, strict=True):
        buffer = memoryview(bytearray(part.size))
        read_part(disk, block, part, digest, buffer)
        payload += buffer
    assert payload == payload_of(block)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlockError):
        read_part(disk, block, parts[-1], digests[-1], memoryview(bytearray(parts[-1].size)))


def test_staged_bytes_are_compared_with_their_digests() -> None:
    parts = [memoryview(b"abc"), memoryview(b"defg")]
    digests = [xxhash.xxh3_128_digest(part) for part in parts]
    assert check_parts(parts, digests) == xxhash.xxh3_128_digest(b"abcdefg")
    with pytest.raises(BlockError):
        check_parts(parts, digests[::-1])


def test_a_temporary_is_never_written_over(disk: PosixDisk) -> None:
    block = identity()
    payload = memoryview(payload_of(block))
    draft = Draft(block, (payload,), bytes(16), f"{block.path}.me.0.tmp", True)
    prepare(disk, draft)
    with pytest.raises(SpillFailed, match="File exists"):
        prepare(disk, draft)


def test_quarantine_keeps_the_reason_and_drops_the_oldest(disk: PosixDisk) -> None:
    paths = [write(disk, identity(first_token=4 * index)) for index in range(1)]
    first = identity()
    held = quarantine(disk, first.path, "corrupt", "found this, expected that", 10**6)
    assert not paths[0].exists()
    note = next((disk.root / "quarantine").glob("*.json"))
    assert "found this, expected that" in note.read_text()
    assert held == sum(path.stat().st_size for path in (disk.root / "quarantine").iterdir())
    other = replace(identity(), chain_hash=b"z" * 32)
    write(disk, other)
    left = quarantine(disk, other.path, "mismatch", "x", held + 100)
    names = [path.name for path in (disk.root / "quarantine").iterdir()]
    assert left <= held + 100
    assert any(name.endswith("mismatch.safetensors") for name in names)
    assert not any(name.endswith("corrupt.safetensors") for name in names)
    assert trim_quarantine(disk, 0) == 0
    assert quarantine(disk, other.path, "corrupt", "it is gone", 100) == 0


def test_names_of_temporaries_tell_their_writer() -> None:
    assert writer_of("aa.safetensors.token7.12.tmp") == "token7"
    assert writer_of("aa.safetensors") is None
    assert writer_of("x.tmp") == ""


def test_a_peek_reads_whose_block_it_is() -> None:
    block = identity()
    head = peek(block.header(bytes(16))[:768])
    assert (head.chain_hash, head.parent, head.first_token) == (block.chain_hash, b"p" * 32, 8)
    for start in (b"", b"\0" * 768, block.header(bytes(16))[:300]):
        with pytest.raises(BlockError):
            peek(start)


def test_a_link_is_never_followed(disk: PosixDisk, tmp_path: Path) -> None:
    block = identity()
    path = write(disk, block)
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        read(disk, block)
