"""Encrypted block files: what they show, and that nothing but the right key opens them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_hash
from millpond.runtime.cli import main
from millpond.runtime.errors import BlockError, ConfigError
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.catalog import open_for_care, verify
from millpond.runtime.kv.disk import PosixDisk
from millpond.runtime.kv.files import (
    Draft,
    block_parts,
    file_bytes,
    prepare,
    publish,
    read_block,
    read_part,
    verify_block,
)
from millpond.runtime.kv.header import BlockIdentity
from millpond.runtime.kv.keys import KEY_VARIABLE, Seal, read_key
from millpond.runtime.kv.layout import LayerGroup
from millpond.runtime.testing.tiny_model import tiny_gemma3

Capture = pytest.CaptureFixture[str]
KEY, OTHER = Seal(b"k" * 32), Seal(b"o" * 32)
GROUP = LayerGroup(0, LayerType.FULL, 1, 2, KvDType.F32, (0, 1))
TOKENS = 3
IDS = pack_tokens([71001, 71002, 71003])
PARENT = bytes(range(32))
BLOCK = BlockIdentity(
    b"f" * 32, b"g" * 32, GROUP, TOKENS, 0, chain_hash(b"f" * 32, PARENT, IDS), PARENT, IDS, KEY
)
PAYLOAD = bytes(range(BLOCK.payload_bytes))


def write(disk: PosixDisk, block: BlockIdentity = BLOCK) -> Path:
    half = len(PAYLOAD) // 2
    parts = (memoryview(PAYLOAD)[:half], memoryview(PAYLOAD)[half:])
    draft = Draft(block, parts, xxhash.xxh3_128_digest(PAYLOAD), f"{block.path}.me.1.tmp", False)
    prepare(disk, draft)
    publish(disk, draft)
    return Path(disk.root) / block.path


def read(disk: PosixDisk, block: BlockIdentity = BLOCK) -> bytes:
    buffer = memoryview(bytearray(block.payload_bytes))
    read_block(disk, block, buffer)
    return bytes(buffer)


def test_a_sealed_block_is_read_whole_and_in_parts(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    path = write(disk)
    assert path.stat().st_size == file_bytes(BLOCK)
    assert read(disk) == PAYLOAD
    parts = block_parts(BLOCK, GROUP.plane_bytes(TOKENS))
    assert len(parts) == 4
    scratch = memoryview(bytearray(parts[0].size))
    for part, digest in zip(parts, verify_block(disk, BLOCK, parts, scratch), strict=True):
        read_part(disk, BLOCK, part, digest, scratch)
        assert bytes(scratch) == PAYLOAD[part.start : part.start + part.size]


def test_the_file_is_safetensors_with_one_u8_tensor_and_shows_neither_ids_nor_rows(
    tmp_path: Path,
) -> None:
    path = write(PosixDisk(tmp_path))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert list(header) == ["__metadata__", "sealed"]
    assert header["sealed"]["dtype"] == "U8"
    assert header["sealed"]["data_offsets"] == [0, len(data) - 8 - size]
    assert IDS not in data and PAYLOAD[:16] not in data and b"token_ids" not in data


def test_no_two_files_share_a_byte_of_their_secret_part(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    first = write(disk).read_bytes()
    second = write(disk).read_bytes()
    start = 8 + int.from_bytes(first[:8], "little")
    assert first[start:] != second[start:]
    assert sum(a == b for a, b in zip(first[start:], second[start:], strict=True)) < len(first) / 16


def test_every_flipped_bit_and_every_truncation_is_refused(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    path = write(disk)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(BlockError):
            read(disk)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BlockError):
            read(disk)
    path.write_bytes(whole + b"x")
    with pytest.raises(BlockError):
        read(disk)


def test_another_key_and_another_block_open_nothing(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    write(disk)
    with pytest.raises(BlockError):
        read(disk, replace(BLOCK, seal=OTHER))
    with pytest.raises(BlockError):
        read(disk, replace(BLOCK, seal=None))
    with pytest.raises(BlockError):
        read(disk, replace(BLOCK, token_ids=pack_tokens([1, 2, 3])))
    with pytest.raises(BlockError):
        read(disk, replace(BLOCK, guard=b"h" * 32))


def test_verify_reports_what_it_cannot_open_and_sets_aside_what_is_damaged(tmp_path: Path) -> None:
    path = write(PosixDisk(tmp_path))
    for key, blocks, unopened in ((None, 0, 1), (OTHER, 0, 1), (KEY, 1, 0)):
        root = open_for_care(tmp_path)
        found = verify(root, key=key)
        root.close()
        assert (found.blocks, found.unopened, found.bad) == (blocks, unopened, [])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    root = open_for_care(tmp_path)
    assert [one[1] for one in verify(root, key=KEY).bad] == ["corrupt"]
    root.close()


def test_a_key_is_32_bytes_or_64_digits(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert read_key(None, {}) is None
    assert read_key(None, {KEY_VARIABLE: "6b" * 32}) == KEY
    file.write_bytes(b"k" * 32)
    assert read_key(str(file), {KEY_VARIABLE: "00" * 32}) == KEY
    file.write_text("6b" * 32 + "\n")
    assert read_key(str(file), {}) == KEY
    assert "k" * 8 not in repr(KEY) and "6b" * 8 not in repr(KEY)
    for bad in (b"", b"k" * 31, b"k" * 33, b"zz" * 32):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match="32 bytes"):
            read_key(str(file), {})
    with pytest.raises(ConfigError, match="spill_key_file"):
        read_key(str(tmp_path / "none"), {})


def test_a_key_without_the_extra_is_said_and_nothing_is_written_in_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millpond.runtime.kv.keys.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="crypto"):
        read_key(None, {KEY_VARIABLE: "6b" * 32})


def test_a_bad_key_is_a_usage_error_and_no_root_is_made(tmp_path: Path, capfd: Capture) -> None:
    model, root, key = tmp_path / "tiny.gguf", tmp_path / "root", tmp_path / "key"
    model.write_bytes(tiny_gemma3())
    key.write_bytes(b"short")
    command = ["generate", "--model", str(model), "--prompt", "hi", "--spill-root", str(root)]
    assert main([*command, "--spill-key-file", str(key)]) == 2
    assert "32 bytes" in capfd.readouterr().err
    assert not root.exists()


def test_a_real_house_hits_with_its_key_and_misses_with_another(
    tmp_path: Path, capfd: Capture
) -> None:
    model, ids, root = tmp_path / "tiny.gguf", tmp_path / "ids.json", tmp_path / "root"
    model.write_bytes(tiny_gemma3())
    ids.write_text(json.dumps([2, *(index % 200 + 10 for index in range(600))]))

    def generate(*key: str) -> tuple[int, list[int]]:
        command = ["generate", "--model", str(model), "--token-ids-file", str(ids), "--json"]
        assert main([*command, "--max-tokens", "2", "--spill-root", str(root), *key]) == 0
        done = json.loads(capfd.readouterr().out)
        return done["usage"]["cached_tokens"], done["token_ids"]

    keys = []
    for number in range(2):
        file = tmp_path / f"key{number}"
        file.write_bytes(os.urandom(32))
        keys.append(("--spill-key-file", str(file)))
    cold, tokens = generate(*keys[0])
    assert cold == 0
    assert generate(*keys[0]) == (512, tokens)
    assert generate(*keys[1]) == (0, tokens)
    assert generate() == (0, tokens)
    assert generate(*keys[0]) == generate(*keys[1]) == generate() == (512, tokens)
    assert not (root / "quarantine").exists()
    command = ["cache", "verify", "--spill-root", str(root), *keys[0], "--json"]
    assert main(command) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["bad"] == [] and found["unopened"] == found["blocks"] / 2 > 0
    sealed = next(path for path in root.rglob("*.safetensors") if b"sealed" in path.read_bytes())
    export = ["cache", "export", sealed.stem, str(tmp_path / "out"), "--model", str(model)]
    assert main([*export, "--spill-root", str(root)]) == 1
    assert "encrypted" in capfd.readouterr().err
