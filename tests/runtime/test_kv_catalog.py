"""What operators do with a root: list, verify, collect, clear, export, import."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from millpond.runtime.errors import BlockError, SpillFailed
from millpond.runtime.kv.catalog import (
    clear,
    collect,
    open_for_care,
    summarise,
    verify,
    verify_file,
)
from millpond.runtime.kv.exchange import export_prefix, import_prefix
from millpond.runtime.kv.files import Draft, temporary_path
from millpond.runtime.kv.header import BlockIdentity, read_identity
from millpond.runtime.kv.root import SpillRoot

_SPEC = importlib.util.spec_from_file_location(
    "kv_writer", Path(__file__).with_name("kv_writer.py")
)
assert _SPEC is not None and _SPEC.loader is not None
kv: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kv)
FILE_BYTES = kv.prompt_blocks(0, 1)[0].header_bytes() + kv.prompt_blocks(0, 1)[0].payload_bytes


def fill(path: Path, seeds: range = range(3), count: int = 4) -> list[BlockIdentity]:
    path.mkdir(exist_ok=True)
    root = open_for_care(path)
    blocks = [block for seed in seeds for block in kv.prompt_blocks(seed, count)]
    for number, block in enumerate(blocks):
        payload = memoryview(kv.payload_of(block))
        temporary = temporary_path(block, root.options.token, number)
        draft = Draft(block, (payload,), xxhash.xxh3_128_digest(payload), temporary, False)
        assert root.store(root.shelf(block.path.rsplit("/", 2)[0]), draft, 0.0) is None
    root.close()
    return blocks


def has(root: SpillRoot, block: BlockIdentity) -> bool:
    return block.chain_hash in root.shelf(block.path.rsplit("/", 2)[0]).blocks


def test_a_summary_shows_the_trees_of_each_group(tmp_path: Path) -> None:
    blocks = fill(tmp_path)
    root = open_for_care(tmp_path)
    (group,) = summarise(root)
    assert (group.blocks, group.bytes) == (12, 12 * FILE_BYTES)
    assert group.group == kv.GROUP.name
    assert {one.first_block for one in group.prefixes} == {
        blocks[0].chain_hash.hex(),
        blocks[4].chain_hash.hex(),
        blocks[8].chain_hash.hex(),
    }
    assert {(one.blocks, one.depth, len(one.tips)) for one in group.prefixes} == {(4, 4, 1)}
    root.close()


def test_a_check_names_what_is_bad_and_the_next_one_is_clean(tmp_path: Path) -> None:
    blocks = fill(tmp_path)
    path = tmp_path / blocks[1].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    steps: list[tuple[int, int]] = []
    root = open_for_care(tmp_path)
    report = verify(root, lambda done, total: steps.append((done, total)))
    assert [(bad[0], bad[1]) for bad in report.bad] == [(blocks[1].path, "corrupt")]
    assert report.blocks == 9  # those behind the bad one went with it
    assert steps[-1] == (12, 12)
    assert verify(root).bad == []
    root.close()
    again = open_for_care(tmp_path)
    assert (verify(again).blocks, verify(again).bad) == (9, [])
    again.close()


def test_a_file_is_checked_without_its_model(tmp_path: Path) -> None:
    block = fill(tmp_path)[2]
    root = open_for_care(tmp_path)
    found = verify_file(root.disk, block.path)
    assert (found.chain_hash, found.parent, found.token_ids) == (
        block.chain_hash,
        block.parent,
        block.token_ids,
    )
    data = (tmp_path / block.path).read_bytes()
    for size in range(0, len(data), 37):
        (tmp_path / block.path).write_bytes(data[:size])
        with pytest.raises(BlockError):
            verify_file(root.disk, block.path)
    header = data[: block.header_bytes()]
    for bit in range(0, 8 * len(header), 5):
        broken = bytearray(header)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            other, _ = read_identity(bytes(broken))
        except BlockError:
            continue
        assert other != block or bytes(broken) != header
    root.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token": "9" * 30},
        {"first_token": "-4"},
        {"token_ids": "AAAA" * 400},
        {"token_ids": ""},
        {"guard": "00"},
        {"group": "g0-full-h999999999-d999999999-f32"},
        {"group": 7},
        {"shape": [2, 2, 10**15, 16]},
        {"shape": [2, 2, True, 16]},
        {"shape": [10**9, 2, 16, 16]},
        {"shape": []},
        {"shape": "abcd"},
    ],
)
def test_a_hostile_header_is_one_typed_error(changes: dict[str, Any]) -> None:
    block = kv.prompt_blocks(0, 1)[0]
    whole = block.header(bytes(16))
    head = json.loads(whole[8:])
    for name, value in changes.items():
        if name == "shape":
            head["k"]["shape"] = head["v"]["shape"] = value
        else:
            head["__metadata__"][name] = value
    text = json.dumps(head, separators=(",", ":")).encode()
    for size in (len(text), len(whole) - 8, 2 * len(whole)):
        with pytest.raises(BlockError):
            read_identity(size.to_bytes(8, "little") + text.ljust(size))


def test_a_collection_evicts_to_a_budget(tmp_path: Path) -> None:
    fill(tmp_path)
    report = collect(tmp_path, 5 * FILE_BYTES + 4000)
    assert (report.blocks, report.removed_blocks) == (5, 7)
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) <= (
        5 * FILE_BYTES + 4000
    )


def test_clear_removes_every_byte(tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill(root)
    (root / "quarantine").mkdir()
    (root / "quarantine" / "x.safetensors").write_bytes(b"bad")
    report = clear(root)
    assert report.left == []
    assert list(root.iterdir()) == []
    assert clear(root).files == 0
    assert clear(tmp_path / "nowhere").files == 0


def test_clear_leaves_what_is_not_ours_and_the_locks_of_living_writers(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    living = open_for_care(tmp_path)
    report = clear(tmp_path)
    assert sorted(report.left) == ["notes.txt", f"writers/{living.options.token}"]
    assert not list(tmp_path.rglob("*.safetensors"))
    living.flush()
    assert living.index.count == 0
    living.close()


def test_clear_of_one_namespace_leaves_the_others(tmp_path: Path) -> None:
    blocks = fill(tmp_path)
    assert clear(tmp_path, "0" * 16).files == 0
    report = clear(tmp_path, blocks[0].fingerprint.hex()[:16])
    assert (report.files, report.bytes) == (12, 12 * FILE_BYTES)


def test_no_root_is_an_error_of_care(tmp_path: Path) -> None:
    with pytest.raises(SpillFailed, match="No such folder"):
        collect(tmp_path / "nowhere", 1)


def test_a_prefix_travels_to_another_root(tmp_path: Path) -> None:
    blocks = fill(tmp_path / "one")
    here, there = open_for_care(tmp_path / "one"), fill(tmp_path / "two", range(1), 1)
    target = tmp_path / "prefix.millpond"
    done = export_prefix(here, blocks[6].chain_hash.hex(), target, "a machine")
    assert (done.blocks, done.bytes) == (3, 3 * FILE_BYTES)
    assert target.stat().st_mode & 0o777 == 0o600
    other = open_for_care(tmp_path / "two")
    found = import_prefix(other, target, kv.FINGERPRINT, kv.GUARD)
    assert (found.blocks, found.refused) == (3, 0)
    assert [has(other, block) for block in blocks[4:8]] == [True, True, True, False]
    assert has(other, there[0])
    assert verify(other).blocks == 4
    with pytest.raises(BlockError, match="made by: a machine"):
        import_prefix(other, target, kv.FINGERPRINT, b"h" * 32)
    with pytest.raises(BlockError, match="another model"):
        import_prefix(other, target, b"h" * 32, kv.GUARD)
    with pytest.raises(BlockError, match="no such block"):
        export_prefix(here, "00" * 32, target, "")
    here.close()
    other.close()


def test_a_damaged_export_is_refused_whole(tmp_path: Path) -> None:
    blocks = fill(tmp_path / "one", range(1), 2)
    here = open_for_care(tmp_path / "one")
    target = tmp_path / "prefix"
    export_prefix(here, blocks[1].chain_hash.hex(), target, "")
    (tmp_path / "two").mkdir()
    other = open_for_care(tmp_path / "two")
    data = target.read_bytes()
    for place in range(0, len(data), 211):
        target.write_bytes(data[:place])
        with pytest.raises(BlockError):
            import_prefix(other, target, kv.FINGERPRINT, kv.GUARD)
        broken = bytearray(data)
        broken[place] ^= 1
        target.write_bytes(broken)
        try:
            import_prefix(other, target, kv.FINGERPRINT, kv.GUARD)
        except BlockError:
            continue
        assert b"numerics" in data[place - 40 : place + 40], place
    for block in blocks:
        if has(other, block):
            assert verify_file(other.disk, block.path) is not None
    here.close()
    other.close()
