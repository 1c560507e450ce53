#!/usr/bin/env python3
"""Run the tests of the example service, then plant a bug in it, which they must catch.

    scripts/example.py [PYTHON]

They run in a copy outside of the checkout, with the millpond that PYTHON (this one by default) has
installed.  Exits 0 if they pass, and fail with the bug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "example_service"
SERVICE = "storyteller.py"
CANCELS, FORGETS = "    scope.cancel()\n", "    pass\n"
CAUGHT_BY = ("test_a_visitor_who_leaves_in_the_middle_ends_the_story", "Leaked: request 0 was")
LIMIT_S = 120.0


class ExampleFailed(Exception):
    """Its tests failed, or did not catch the bug; the message has their output."""


def check_example(python: Path, *arguments: str) -> None:
    """Run the tests with and without the bug; raises ExampleFailed.

    arguments  for pytest
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "service"
        shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        done = _pytest(python, copy, arguments)
        if done.returncode:
            raise ExampleFailed(f"the example's tests failed:\n{done.stdout}{done.stderr}")
        print(done.stdout.splitlines()[-1], flush=True)
        _plant(copy / SERVICE)
        test, message = CAUGHT_BY
        done = _pytest(python, copy, [*arguments, "-k", test])
        if done.returncode != 1 or done.stdout.count(message) < len(("asyncio", "trio")):
            raise ExampleFailed(f"the planted bug was not caught:\n{done.stdout}{done.stderr}")
        print("a service that forgets to cancel is caught", flush=True)


def _plant(service: Path) -> None:
    text = service.read_text(encoding="utf-8")
    if text.count(CANCELS) != 1:
        raise ExampleFailed(f"{service.name}: found {text.count(CANCELS)} places for the bug")
    service.write_text(text.replace(CANCELS, FORGETS), encoding="utf-8")


def _pytest(
    python: Path, folder: Path, arguments: list[str] | tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


if __name__ == "__main__":
    try:
        check_example(Path(sys.argv[1] if len(sys.argv) > 1 else sys.executable))
    except ExampleFailed as failure:
        print(failure)
        sys.exit(1)
