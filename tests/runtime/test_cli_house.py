"""``millpond generate`` over a real house and a tiny model: warm, damaged, refused, interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from millpond.runtime.cli import main
from millpond.runtime.testing.gguf_writer import RawTensor
from millpond.runtime.testing.tiny_model import BOS, CONTEXT_TOKENS, tiny_gemma3
from safetensors import safe_open

Capture = pytest.CaptureFixture[str]
PROMPT = [BOS, *(261 + (index * 7 + index // 26) % 26 for index in range(699))]
CACHED = 512


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a" / "spill root"


def command(model: Path, root: Path, *more: str) -> list[str]:
    ids = model.with_name("ids.json")
    ids.write_text(json.dumps(PROMPT), encoding="utf-8")
    flags = ["--token-ids-file", str(ids), "--max-tokens", "8", "--temperature", "0", "--json"]
    return ["generate", "--model", str(model), *flags, "--spill-root", str(root), *more]


def generated(capfd: Capture, arguments: list[str]) -> tuple[dict[str, Any], str]:
    code = main(arguments)
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out), err


def in_another_process(arguments: list[str]) -> dict[str, Any]:
    """The BLAS under MLX is chosen once in a process, so what may meet is made by new ones."""
    whole = [sys.executable, "-m", "millpond.runtime", *arguments]
    done = subprocess.run(whole, capture_output=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def listed(capfd: Capture, root: Path) -> dict[str, Any]:
    assert main(["cache", "ls", "--json", "--spill-root", str(root)]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_new_process_restores_what_another_one_spilled(
    backend: str, model: Path, root: Path
) -> None:
    cold = in_another_process(command(model, root))
    warm = in_another_process(command(model, root, "--backend", backend))
    assert (cold["usage"]["cached_tokens"], warm["usage"]["cached_tokens"]) == (0, CACHED)
    assert cold["usage"]["prompt_tokens"] == len(PROMPT)
    assert cold["token_ids"] == warm["token_ids"] and cold["text"] == warm["text"]
    assert cold["spill"]["blocks"] > 0 == warm["spill"]["blocks"]
    # two blocks of the full layer, and the two that a window of 300 tokens before 512 touches
    assert warm["restore"]["blocks"] == 4
    payload = 2 * 256 * (128 + 384)
    assert payload < warm["restore"]["bytes"] <= 1.05 * payload
    assert cold["restore"] == {"blocks": 0, "bytes": 0, "misses": cold["restore"]["misses"]}


def test_a_block_file_is_plain_safetensors(model: Path, root: Path, capfd: Capture) -> None:
    generated(capfd, command(model, root))
    paths = sorted(root.glob("v1/*/*/*/*.safetensors"))
    assert paths
    for path in paths:
        with safe_open(path, framework="numpy") as block:
            assert sorted(block.keys()) == ["k", "v"]
            assert block.get_tensor("k").shape[1:] == (1, 256, 16)
            assert block.metadata()["chain_hash"] == path.stem


def test_one_flipped_byte_is_quarantined_and_changes_nothing(
    model: Path, root: Path, capfd: Capture
) -> None:
    cold, _ = generated(capfd, command(model, root))
    damaged = sorted(root.glob("v1/*/g*-full-*/*/*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-7] ^= 4
    damaged.write_bytes(data)
    warm, _ = generated(capfd, command(model, root))
    assert warm["token_ids"] == cold["token_ids"]
    assert warm["usage"]["cached_tokens"] < CACHED
    assert warm["restore"]["misses"]["corrupt"] == 1
    (entry,) = listed(capfd, root)["quarantine"]
    assert damaged.stem in entry["file"] and entry["reason"] == "corrupt" and entry["detail"]
    again, _ = generated(capfd, command(model, root))
    assert again["usage"]["cached_tokens"] == CACHED and again["token_ids"] == cold["token_ids"]


def test_other_weights_at_the_same_path_start_cold(model: Path, root: Path, capfd: Capture) -> None:
    generated(capfd, command(model, root))
    data = bytearray(model.read_bytes())
    data[-33] ^= 1
    model.write_bytes(data)
    changed, _ = generated(capfd, command(model, root))
    assert changed["usage"]["cached_tokens"] == 0


def test_cache_ls_shows_namespaces_groups_and_sizes(
    model: Path, root: Path, capfd: Capture
) -> None:
    assert listed(capfd, root)["blocks"] == 0 and not root.exists()
    report, _ = generated(capfd, command(model, root))
    found = listed(capfd, root)
    assert (found["blocks"], found["bytes"]) == (
        report["spill"]["blocks"],
        report["spill"]["bytes"],
    )
    (space,) = found["namespaces"]
    assert report["model"]["fingerprint"].startswith(space["namespace"])
    kinds = sorted(group["group"].split("-")[1] for group in space["groups"])
    assert kinds == ["full", "sliding"]
    assert main(["cache", "ls", "--spill-root", str(root)]) == 0
    assert space["namespace"] in capfd.readouterr().out


def test_a_root_that_cannot_be_used_is_said_and_served_without(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    taken = tmp_path / "file"
    taken.write_bytes(b"")
    for root in (taken, taken / "below"):
        report, err = generated(capfd, command(model, root))
        assert "spilling is off" in err and len(err.splitlines()) == 2
        assert report["spill"]["blocks"] == 0 and len(report["token_ids"]) > 0
    quiet, err = generated(capfd, command(model, taken, "--no-spill"))
    assert "spilling" not in err and quiet["token_ids"] == report["token_ids"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_permission_is_said_and_served_without(
    model: Path, tmp_path: Path, capfd: Capture
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    report, err = generated(capfd, command(model, locked))
    assert "Permission denied" in err and report["spill"]["blocks"] == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_prompt_beyond_the_context_is_one_line(
    backend: str, model: Path, root: Path, capfd: Capture
) -> None:
    text = "a" * (CONTEXT_TOKENS + 1)
    arguments = ["generate", "--model", str(model), "--prompt", text, "--backend", backend]
    assert main([*arguments, "--spill-root", str(root)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert str(CONTEXT_TOKENS) in err and str(len(text) + 1) in err


def test_an_id_outside_the_vocabulary_is_one_line(model: Path, root: Path, capfd: Capture) -> None:
    arguments = command(model, root)
    model.with_name("ids.json").write_text("[1, 288]", encoding="utf-8")
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "288" in err


def test_a_model_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, root: Path, capfd: Capture
) -> None:
    tiny = tiny_gemma3()
    odd = RawTensor((288, 32), "IQ4_NL", bytes(288 * 18))
    files = {
        "no such file": None,
        "not a GGUF": b"PK" + bytes(100),
        "truncated header": tiny[:300],
        "truncated tensors": tiny[:-100],
        "mamba": tiny_gemma3(metadata={"general.architecture": "mamba"}),
        "IQ4_NL": tiny_gemma3(tensors={"token_embd.weight": odd}),
    }
    for name, data in files.items():
        path = tmp_path / f"{name}.gguf"
        if data is not None:
            path.write_bytes(data)
        assert main(command(path, root)) == 1, name
        out, err = capfd.readouterr()
        assert out == "" and len(err.splitlines()) == 1, name
        assert name.partition(" ")[0] in err
    assert main(command(tmp_path / "mamba.gguf", root)) == 1
    assert "gemma3" in capfd.readouterr().err
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert main(command(folder, root)) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_ctrl_c_in_the_middle_leaves_a_usable_root(model: Path, root: Path) -> None:
    arguments = command(model, root)
    arguments[arguments.index("--max-tokens") + 1] = "1300"
    arguments.remove("--json")
    running = subprocess.Popen(
        [sys.executable, "-u", "-m", "millpond.runtime", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.read(1)  # it decodes
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode in (130, 0), err  # 0: it had ended by itself
    assert b"Traceback" not in err
    warm = in_another_process(command(model, root))
    assert warm["usage"]["cached_tokens"] == CACHED
