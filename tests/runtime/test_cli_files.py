"""The command line on real files: models good and bad, standard streams that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millpond.runtime.cli import main
from millpond.runtime.testing.gguf_writer import RawTensor
from millpond.runtime.testing.tiny_model import tiny_gemma3

Capture = pytest.CaptureFixture[str]


def lines(text: str) -> list[str]:
    return text.splitlines()


# -- model files


@pytest.fixture
def bad_models(tmp_path: Path) -> dict[str, Path]:
    tiny = tiny_gemma3()
    q9 = RawTensor((288, 32), "IQ4_NL", bytes(288 * 18))
    files = {
        "not a GGUF": b"PK" + bytes(100),
        "empty": b"",
        "truncated header": tiny[:300],
        "truncated tensors": tiny[:-100],
        "architecture": tiny_gemma3(metadata={"general.architecture": "mamba"}),
        "tensor type": tiny_gemma3(tensors={"token_embd.weight": q9}),
        "escape": tiny_gemma3(metadata={"general.architecture": "\x1b[31mred\nnew"}),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
    found = {name: tmp_path / f"{name}.gguf" for name in files}
    return found | {"missing": tmp_path / "missing.gguf", "folder": tmp_path}


def test_inspect_refuses_what_is_no_gguf(bad_models: dict[str, Path], capfd: Capture) -> None:
    for name in ("missing", "folder", "not a GGUF", "empty", "truncated header"):
        for command in (["inspect", "--model"], ["tokenize", "--json"], ["inspect", "--json"]):
            assert main([*command, str(bad_models[name])]) == 1, name
            out, err = capfd.readouterr()
            assert out == "" and len(lines(err)) == 1, name


def test_inspect_says_why_a_file_cannot_be_served(
    bad_models: dict[str, Path], capfd: Capture
) -> None:
    assert main(["inspect", str(bad_models["architecture"])]) == 0
    out = capfd.readouterr().out
    assert "no: " in out and "mamba" in out and "gemma3" in out
    assert main(["inspect", "--json", str(bad_models["tensor type"])]) == 0
    problem = json.loads(capfd.readouterr().out)["problem"]
    assert "IQ4_NL" in problem and "token_embd.weight" in problem


def test_a_file_cannot_write_to_the_terminal(bad_models: dict[str, Path], capfd: Capture) -> None:
    assert main(["inspect", str(bad_models["escape"])]) == 0
    out = capfd.readouterr().out
    assert "\x1b" not in out and "\\x1b[31mred" in out


def test_tokenize_takes_stdin_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    command = [sys.executable, "-m", "millpond.runtime", "tokenize", "--model", str(path)]
    text = b"ab\r\n<eos>"

    def ids(*flags: str) -> Any:
        done = subprocess.run(
            [*command, *flags], input=text, capture_output=True, check=True, cwd=tmp_path
        )
        return json.loads(done.stdout) if "--json" in flags else done.stdout.decode()

    plain = ids("--json")
    assert plain["bos"] == 1 and plain["token_ids"][:4] == [261, 262, 5 + 13, 5 + 10]
    assert ids("--json", "--special", "--bos")["token_ids"] == [1, 261, 262, 5 + 13, 5 + 10, 2]
    assert lines(ids("--special"))[-1] == "2\t<eos>"


# -- output


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    command = [sys.executable, "-m", "millpond.runtime", "inspect", str(path)]
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (1, b"")


def test_stdout_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    command = f'"{sys.executable}" -m millpond.runtime inspect "{path}"'
    ends = {">&-": "it is closed"}
    if Path("/dev/full").exists():
        ends["> /dev/full"] = "No space left on device"
    for end, said in ends.items():
        shell = ["bash", "-c", f"{command} {end}"]
        found = subprocess.run(shell, stderr=subprocess.PIPE, check=False)
        assert found.returncode == 1
        assert found.stderr.decode() == f"millpond: stdout: {said}\n"


def test_the_tiny_model_is_the_same_for_the_same_seed() -> None:
    assert tiny_gemma3(1) == tiny_gemma3(1) != tiny_gemma3(2)
    assert tiny_gemma3(tensors={"output_norm.weight": np.ones(32, np.float32)}) != tiny_gemma3()
