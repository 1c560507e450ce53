#!/usr/bin/env python3
"""Run hostile worlds: the real actors on a simulated disk, a fake model and a seeded schedule.

    scripts/simulate.py --seeds 10000                # worlds 0 to 9999
    scripts/simulate.py --seeds 100 --first-seed 500
    scripts/simulate.py --seed 17 --trace            # one world, message by message
    scripts/simulate.py --seed 17 --shrink           # a smaller world that breaks the same rule
    scripts/simulate.py --plan world.json --trace    # a world as --shrink printed it

Worlds that aim follow: for each ``await`` of an actor where no cancellation arrived by then, an
actor fails as soon as one waits there (``--aimed 0`` leaves them out; ``--seed N --aim PLACE``
repeats one).  Ends with the faults that happened, by kind, the places of the actors where a
cancellation arrived, worlds per second of processor time, and ``violations: N``.

Exits 0 without a violation, 1 with one (its seed and the command that replays it are printed), 2 on
a bad argument.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from millpond.runtime.testing.cancellations import CancellationCoverage, actor_places
from millpond.runtime.testing.shrink import shrink
from millpond.runtime.testing.world import WorldResult, run_world
from millpond.runtime.testing.world_draw import draw_aimed, draw_plan
from millpond.runtime.testing.world_plan import WorldPlan

SHARE = 50  # worlds that a process runs before it reports
SHOWN_MISSING = 40
AIMED = 300  # worlds that try to fail at one place


@dataclass(slots=True)
class Tally:
    """What a number of worlds gave; ``violations`` are (arguments, what broke)."""

    worlds: int = 0
    processor_s: float = 0.0
    violations: list[tuple[str, str]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    aimed: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    shared_tokens: int = 0
    cancelled_at: set[tuple[str, int]] = field(default_factory=set)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.worlds += other.worlds
        self.processor_s += other.processor_s
        self.violations += other.violations
        self.seeds += other.seeds
        self.aimed += other.aimed
        self.injected += other.injected
        self.outcomes += other.outcomes
        self.cached_tokens += other.cached_tokens
        self.shared_tokens += other.shared_tokens
        self.cancelled_at |= other.cancelled_at

    def count(self, seed: int, result: WorldResult, more: str = "") -> None:
        """Add one world; ``more`` are the arguments that repeat it, beside its seed."""
        self.worlds += 1
        self.injected += result.injected
        self.outcomes += result.outcomes
        self.cached_tokens += result.cached_tokens
        self.shared_tokens += result.shared_tokens
        if result.violation is not None:
            self.violations.append((f"--seed {seed}{more}", result.violation))
            self.seeds.append(seed)


def run_share(seeds: range) -> Tally:
    """Run some worlds in this process."""
    logging.disable(logging.CRITICAL)  # worlds are full of planned warnings
    gc.collect()
    gc.freeze()
    gc.disable()  # cycles are few and a share is short
    tally, coverage = Tally(), CancellationCoverage()
    started = time.process_time()
    for seed in seeds:
        tally.count(seed, run_world(draw_plan(seed), probe=coverage.probe))
    tally.processor_s = time.process_time() - started
    tally.cancelled_at = coverage.seen
    return tally


def aim(tally: Tally, first: int, tries: int) -> None:
    """Run worlds that fail at the places which no cancellation met, until one does."""
    logging.disable(logging.CRITICAL)
    coverage = CancellationCoverage()
    coverage.merge(tally.cancelled_at)
    started = time.process_time()
    for number, place in enumerate(actor_places()):
        for seed in range(first, first + tries):
            if place not in coverage.missing():
                break
            result = run_world(draw_aimed(seed, number), probe=coverage.probe)
            tally.count(seed, result, f" --aim {number}")
            tally.aimed += 1
    tally.processor_s += time.process_time() - started
    tally.cancelled_at = coverage.seen


def shares(first: int, count: int) -> Iterator[range]:
    """Cut the seeds into shares."""
    for start in range(first, first + count, SHARE):
        yield range(start, min(start + SHARE, first + count))


def run_many(arguments: argparse.Namespace) -> int:
    """Run worlds and report; return the exit code."""
    tally = Tally()
    parts = shares(arguments.first_seed, arguments.seeds)
    if arguments.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            for one in pool.imap_unordered(run_share, parts):
                tally.add(one)
                show_progress(tally, arguments)
    else:
        for part in parts:
            tally.add(run_share(part))
            show_progress(tally, arguments)
    aim(tally, arguments.first_seed, arguments.aimed)
    report(tally, arguments)
    return 1 if tally.violations else 0


def show_progress(tally: Tally, arguments: argparse.Namespace) -> None:
    """On a terminal, say how far it is."""
    if sys.stderr.isatty():
        print(f"\r{tally.worlds} of {arguments.seeds} worlds", end="", file=sys.stderr, flush=True)


def report(tally: Tally, arguments: argparse.Namespace) -> None:
    """Print what came of it."""
    coverage = CancellationCoverage()
    coverage.merge(tally.cancelled_at)
    covered, missing = coverage.covered(), coverage.missing()
    rate = tally.worlds / max(tally.processor_s, 1e-9)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if arguments.json:
        figures = {
            "worlds": tally.worlds,
            "worlds_per_second": round(rate, 1),
            "violations": len(tally.violations),
            "seeds": sorted(tally.seeds),
            "replays": [repeat for repeat, _ in tally.violations],
            "aimed_worlds": tally.aimed,
            "injected": dict(sorted(tally.injected.items())),
            "outcomes": dict(sorted(tally.outcomes.items())),
            "cached_tokens": tally.cached_tokens,
            "shared_tokens": tally.shared_tokens,
            "cancelled_awaits": len(covered),
            "missing_awaits": [str(place) for place in missing],
        }
        print(json.dumps(figures))
        return
    for repeat, violation in tally.violations:
        print(f"{repeat}: {violation}")
        print(f"  replay: scripts/simulate.py {repeat} --trace")
    print("faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(tally.injected.items())))
    print("requests: " + ", ".join(f"{kind} {n}" for kind, n in sorted(tally.outcomes.items())))
    print(f"tokens from the cache: {tally.cached_tokens}, {tally.shared_tokens} of a live one")
    print(f"awaits cancelled: {len(covered)} of {len(covered) + len(missing)}")
    for place in missing[:SHOWN_MISSING]:
        print(f"  not yet: {place}")
    aimed = f"{tally.aimed} of them aimed, " if tally.aimed else ""
    print(f"worlds: {tally.worlds}, {aimed}{rate:.1f} per second of one core")
    print(f"violations: {len(tally.violations)}")


def run_one(plan: WorldPlan, arguments: argparse.Namespace) -> int:
    """Run one world; return the exit code."""
    logging.disable(logging.CRITICAL)
    lines: list[str] | None = [] if arguments.trace else None
    result = run_world(plan, lines)
    for line in lines or ():
        print(line)
    if arguments.shrink and result.violation is not None:
        rule = result.violation.split(":")[0]
        plan = shrink(plan, lambda one: (run_world(one).violation or "").split(":")[0] == rule)
        result = run_world(plan)
        print(msgspec.json.encode(plan).decode())
    print(f"digest: {result.digest}")
    if result.violation is not None:
        print(f"violation: {result.violation}")
    print(f"violations: {int(result.violation is not None)}")
    return 1 if result.violation is not None else 0


def main() -> int:
    """Read the arguments and do what they say."""
    parser = argparse.ArgumentParser(description="Run simulated worlds.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds (default 1000)")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seed", type=int, help="run one world")
    parser.add_argument("--aim", type=int, help="with --seed: number of a place to fail at")
    parser.add_argument("--aimed", type=int, default=AIMED, help="worlds for a place at most")
    parser.add_argument("--plan", type=Path, help="run the world in this JSON file")
    parser.add_argument("--trace", action="store_true", help="print it, message by message")
    parser.add_argument("--shrink", action="store_true", help="make a failing world smaller")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs: expected at least 1")
    if arguments.plan is not None:
        try:
            plan = msgspec.json.decode(arguments.plan.read_bytes(), type=WorldPlan)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"--plan: {error}")
        return run_one(plan, arguments)
    if arguments.seed is not None:
        plan = draw_plan(arguments.seed)
        if arguments.aim is not None:
            plan = draw_aimed(arguments.seed, arguments.aim)
        return run_one(plan, arguments)
    return run_many(arguments)


if __name__ == "__main__":
    sys.exit(main())
