#!/usr/bin/env python3
"""Measure the simulation: plant bugs one at a time and see which seed catches each.

    scripts/mutants.py                  # every bug, at most 2,500 worlds each
    scripts/mutants.py --only salt      # those whose name holds that word
    scripts/mutants.py --list

The package is copied to a temporary folder, which stands first on the path of the process that
runs the worlds; the checkout is never changed.  Without any bug the same worlds must pass.
Exits 0 if every bug is caught, 1 if one is not or does not apply, 2 on a bad argument.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from planted_bugs import BUGS, PlantedBug

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "codecs", "runtime")
RUN_WORLDS = """
import gc, json, logging, sys
logging.disable(logging.CRITICAL)
from millpond.runtime.testing.world import run_world
from millpond.runtime.testing.world_draw import draw_plan
first, count = int(sys.argv[1]), int(sys.argv[2])
print(json.dumps({"ready": True}), flush=True)
for seed in range(first, first + count):
    violation = run_world(draw_plan(seed)).violation
    if violation is not None:
        print(json.dumps({"seed": seed, "violation": violation}), flush=True)
        break
else:
    print(json.dumps({"seed": None}), flush=True)
"""


class DoesNotApply(Exception):
    """A bug's text is not in its file, or more than once."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one bug: the seed that caught it and what that world said, or why none did."""

    seed: int | None
    text: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """True iff some world failed, or never ended."""
        return self.seed is not None


def copy_package(folder: Path) -> Path:
    """Copy the package without its caches; return the folder for the path."""
    package = folder / "millpond"
    package.mkdir(parents=True)
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / ".src" / "millpond" / name, package / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def plant(folder: Path, bug: PlantedBug) -> dict[Path, str]:
    """Change the copy; return the texts to put back.  Raises DoesNotApply."""
    before: dict[Path, str] = {}
    for edit in bug.edits:
        path = folder / "millpond" / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            restore(before)
            found = text.count(edit.old)
            raise DoesNotApply(f"{edit.file}: found the text {found} times, expected once")
        before.setdefault(path, text)
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return before


def restore(texts: dict[Path, str]) -> None:
    """Put the copy back."""
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def run_worlds(folder: Path, first: int, count: int, timeout_s: float) -> Verdict:
    """Run worlds on the copy until one fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN_WORLDS, str(first), str(count)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(first, f"some world did not end within {timeout_s:g} s", timeout_s)
    seconds = time.monotonic() - started
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        raise DoesNotApply(f"the package cannot be imported: {done.stderr.strip()[-200:]}")
    if len(lines) == 1:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Verdict(first, f"a world ended the process: {last}", seconds)
    return Verdict(lines[1]["seed"], lines[1].get("violation", "no world failed"), seconds)


def try_bug(folder: Path, bug: PlantedBug, arguments: argparse.Namespace) -> Verdict:
    """Plant one bug, run worlds, put the copy back."""
    texts = plant(folder, bug)
    try:
        return run_worlds(folder, arguments.first_seed, arguments.seeds, arguments.timeout)
    finally:
        restore(texts)


def show(name: str, verdict: Verdict) -> None:
    """Print one row of the table."""
    seed = "-" if verdict.seed is None else str(verdict.seed)
    print(f"{name:<76} {seed:>6} {verdict.seconds:6.1f} s  {verdict.text[:90]}", flush=True)


def main() -> int:
    """Read the arguments and do what they say."""
    parser = argparse.ArgumentParser(description="Plant bugs and see which seed catches them.")
    parser.add_argument("--seeds", type=int, default=2500, help="worlds at most (default 2500)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--only", default="", help="bugs whose name holds this text")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one bug")
    parser.add_argument("--skip-baseline", action="store_true", help="do not try without a bug")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if arguments.only in bug.name]
    if not bugs or arguments.seeds < 1:
        parser.error("--only: no bug has such a name" if not bugs else "--seeds: at least 1")
    if arguments.list:
        print("\n".join(bug.name for bug in bugs))
        return 0
    with tempfile.TemporaryDirectory(prefix="millpond-mutants-") as name:
        return run_all(copy_package(Path(name)), bugs, arguments)


def run_all(folder: Path, bugs: list[PlantedBug], arguments: argparse.Namespace) -> int:
    """Try every bug; return the exit code."""
    print(f"{'planted bug':<76} {'seed':>6} {'time':>8}  what the world said")
    caught = failed = 0
    if not arguments.skip_baseline:
        baseline = run_worlds(folder, arguments.first_seed, arguments.seeds, 10 * arguments.timeout)
        show("(none)", baseline)
        failed += baseline.is_caught
    for bug in bugs:
        try:
            verdict = try_bug(folder, bug, arguments)
        except DoesNotApply as error:
            verdict = Verdict(None, f"does not apply: {error}", 0.0)
        show(bug.name, verdict)
        caught += verdict.is_caught
    print(f"caught: {caught} of {len(bugs)}")
    return 0 if caught == len(bugs) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
