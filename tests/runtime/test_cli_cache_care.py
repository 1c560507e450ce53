"""``millpond cache`` verify, gc, clear, export and import, on a root that a real house filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from millpond.runtime.cli import main
from millpond.runtime.testing.tiny_model import tiny_gemma3

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    return path


def generate(model: Path, root: Path, capfd: Capture, *more: str) -> dict[str, Any]:
    ids = model.with_name("ids.json")
    ids.write_text(json.dumps([2, *(index % 200 + 10 for index in range(600))]))
    command = ["generate", "--model", str(model), "--token-ids-file", str(ids), "--json"]
    command += ["--max-tokens", "2", "--spill-root", str(root), *more]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def cache(capfd: Capture, *command: str, code: int = 0) -> dict[str, Any]:
    assert main(["cache", *command, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_verify_exits_1_and_names_the_file_and_the_next_one_exits_0(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    root = tmp_path / "root"
    generate(model, root, capfd)
    whole = cache(capfd, "verify", "--spill-root", str(root))
    assert whole["bad"] == [] and whole["blocks"] > 2
    victim = sorted(root.glob("v1/*/*full*/*/*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    found = cache(capfd, "verify", "--spill-root", str(root), code=1)
    assert [one["path"] for one in found["bad"]] == [str(victim.relative_to(root))]
    assert main(["cache", "verify", "--spill-root", str(root)]) == 0


def test_gc_keeps_to_a_budget_and_clear_leaves_no_byte(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    root = tmp_path / "root"
    generate(model, root, capfd)
    found = cache(capfd, "gc", "--spill-root", str(root), "--spill-bytes-max", "12KiB")
    assert found["removed_blocks"] > 0
    assert sum(one.stat().st_size for one in root.rglob("*") if one.is_file()) <= 12 * 1024
    assert cache(capfd, "clear", "--spill-root", str(root))["left"] == []
    assert list(root.iterdir()) == []
    assert cache(capfd, "verify", "--spill-root", str(root))["blocks"] == 0
    assert main(["cache", "gc", "--spill-root", str(tmp_path / "no")]) == 1


def test_an_exported_prefix_is_a_hit_on_another_root(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    one, two, file = tmp_path / "one", tmp_path / "two", str(tmp_path / "prefix")
    cold = generate(model, one, capfd)
    tips = sorted(one.glob("v1/*/*full*/*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    exported = cache(
        capfd, "export", tips[-1].stem, file, "--model", str(model), "--spill-root", str(one)
    )
    taken = cache(capfd, "import", file, "--model", str(model), "--spill-root", str(two))
    assert taken["blocks"] == exported["blocks"] and taken["refused"] == 0
    warm = generate(model, two, capfd)
    assert warm["usage"]["cached_tokens"] == 512
    assert warm["token_ids"] == cold["token_ids"]


def test_an_export_of_other_weights_is_refused_with_the_reason(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    one, two, file = tmp_path / "one", tmp_path / "two", str(tmp_path / "prefix")
    generate(model, one, capfd)
    tip = sorted(one.glob("v1/*/*full*/*/*.safetensors"))[0].stem
    cache(capfd, "export", tip, file, "--model", str(model), "--spill-root", str(one))
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    model.write_bytes(data)
    assert main(["cache", "import", file, "--model", str(model), "--spill-root", str(two)]) == 1
    assert (
        "the weights, the configuration or the machine's numbers differ" in capfd.readouterr().err
    )


def test_a_pinned_prompt_is_listed_and_stays_until_it_is_unpinned(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    root, place = tmp_path / "root", ("--spill-root", str(tmp_path / "root"))
    generate(model, root, capfd, "--pin", "3600")
    found = cache(capfd, "ls", *place)["pinned"]
    blocks = {path.stem for path in root.glob("v1/*/*/*/*.safetensors")}
    assert {one["tip"] for one in found} <= blocks and found
    assert cache(capfd, "gc", *place, "--spill-bytes-max", "1GiB")["removed_blocks"] == 0
    assert len(cache(capfd, "ls", *place)["pinned"]) == len(found)
    assert main(["cache", "ls", *place]) == 0
    assert "pinned until" in capfd.readouterr().out
    assert cache(capfd, "unpin", *place)["unpinned"] == len(found)
    assert cache(capfd, "ls", *place)["pinned"] == []
    assert main(["cache", "unpin", "ab" * 32, *place]) == 1


def test_generate_says_that_a_pin_was_refused(model: Path, tmp_path: Path, capfd: Capture) -> None:
    ids = model.with_name("ids.json")
    ids.write_text(json.dumps([2, *range(10, 190), *range(10, 190), *range(10, 190)]))
    command = ["generate", "--model", str(model), "--token-ids-file", str(ids), "--no-spill"]
    assert main([*command, "--max-tokens", "2", "--pin", "60"]) == 0
    assert "not pinned" in capfd.readouterr().err
    assert main([*command, "--pin", "-1"]) == 1
