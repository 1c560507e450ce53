"""The fuzzer itself, for a short while; the long run is ``scripts/fuzz_gguf.py --runs 100000``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_gguf.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_two_thousand_damaged_headers_give_typed_errors_only() -> None:
    done = run("--runs", "2000", "--seed", "7")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["failed"] == 0 and summary["runs"] == 2000
    assert summary["outcomes"]["GgufError"] > 1000 and summary["outcomes"]["read"] > 0
    again = json.loads(run("--runs", "2000", "--seed", "7").stdout)
    assert again["outcomes"] == summary["outcomes"]


def test_a_bad_flag_is_a_usage_error() -> None:
    assert run("--runs", "many").returncode == 2
