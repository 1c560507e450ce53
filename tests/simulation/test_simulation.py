"""Hostile worlds: the real actors on a simulated disk, a fake model and a seeded schedule."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from millpond.runtime.testing.shrink import shrink
from millpond.runtime.testing.world import run_world
from millpond.runtime.testing.world_draw import draw_plan

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
WORLDS = 1000
MISSING_MAX = 3  # awaits where no world of a run has cancelled; none as this was written


def past_worlds() -> list[object]:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from past_worlds import PAST_WORLDS
    finally:
        sys.path.pop(0)
    return list(PAST_WORLDS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Worlds are full of planned warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(script: str, *arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT
    )


def test_a_thousand_worlds_break_no_rule() -> None:
    jobs = str(os.cpu_count() or 1)
    done = run("simulate.py", "--seeds", str(WORLDS), "--jobs", jobs, "--json", seconds=900.0)
    figures = json.loads(done.stdout)
    assert figures["replays"] == [], "replay: scripts/simulate.py " + figures["replays"][0]
    assert done.returncode == 0
    assert figures["worlds"] == WORLDS + figures["aimed_worlds"]
    missing = [place for place in figures["missing_awaits"] if "pin" not in place]  # not drawn yet
    assert len(missing) <= MISSING_MAX, missing
    assert figures["cached_tokens"] > WORLDS
    kinds = {kind.split()[0] for kind in figures["injected"]}
    assert kinds >= {"ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE", "slow", "stuck", "short", "rot"}
    assert {"vanish", "engine0", "reader0", "writer", "model"} <= kinds
    assert {"power", "process", "bytes", "name", "late"} <= kinds


@pytest.mark.parametrize("past", past_worlds(), ids=lambda past: past.story.split(":")[0][:60])
def test_a_past_failure_stays_in_the_past(past: object) -> None:
    assert run_world(past.plan).violation is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [3, 4, 17, 23])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    plan = draw_plan(seed)
    first, again = run_world(plan), run_world(plan)
    assert first.digest == again.digest
    assert first.events == again.events > 20


def test_a_trace_does_not_depend_on_the_process() -> None:
    """Hash seeds and addresses differ between processes; worlds on both back ends must not."""
    seeds = [*[seed for seed in range(200) if draw_plan(seed).backend == "asyncio"][:2], 5, 6]
    program = (
        "import logging; logging.disable(50)\n"
        "from millpond.runtime.testing.world import run_world\n"
        "from millpond.runtime.testing.world_draw import draw_plan\n"
        f"print([run_world(draw_plan(seed)).digest for seed in {seeds}])"
    )
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_other_seeds_give_other_worlds() -> None:
    assert draw_plan(1) != draw_plan(2)
    assert len({run_world(draw_plan(seed)).digest for seed in range(5)}) == 5


def test_a_trace_reads_message_by_message() -> None:
    lines: list[str] = []
    run_world(draw_plan(3), lines)
    text = "\n".join(lines)
    for word in ("submissions  submit", "admissions admit", "tokens tokens", "finished", "disk"):
        assert word.replace("  ", " ") in " ".join(text.split())


def test_a_failing_world_shrinks() -> None:
    """The rule here is one that many worlds break: some request is cancelled."""
    plan = next(
        plan for plan in map(draw_plan, range(200)) if run_world(plan).outcomes["cancelled"]
    )
    small = shrink(plan, lambda one: run_world(one).outcomes["cancelled"] > 0)
    assert run_world(small).outcomes["cancelled"] == 1
    assert sum(len(process.requests) for process in small.processes) == 1
    gc.collect()


@pytest.mark.parametrize(
    "words",
    ["wrong ring slot", "hash without parent", "cancel dropped in restore", "engine does not hear"],
)
def test_a_planted_bug_is_caught(words: str) -> None:
    done = run("mutants.py", "--only", words, "--seeds", "200", "--skip-baseline")
    assert done.returncode == 0, done.stdout
    assert "caught: 1 of 1" in done.stdout


def test_a_bug_that_does_not_apply_is_no_success(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import mutants, planted_bugs\n"
        "mutants.BUGS = (planted_bugs.one('gone', 'actors/engine.py', 'no such text', ''),)\n"
        "sys.argv = ['mutants.py', '--skip-baseline', '--seeds', '1']\n"
        "sys.exit(mutants.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "does not apply" in done.stdout
