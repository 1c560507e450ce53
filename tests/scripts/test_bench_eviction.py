"""The eviction bench: its policies keep their size, and the one in use is no worse than LRU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "bench_eviction", Path(__file__).parents[2] / "scripts" / "bench_eviction.py"
)
assert _SPEC is not None and _SPEC.loader is not None
bench: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


@pytest.mark.parametrize("scans", [0.1, 0.3])
def test_scans_cost_2q_less_than_lru(scans: float) -> None:
    chains = list(bench.trace(400, 1, scans))
    assert chains == list(bench.trace(400, 1, scans)), "the same trace for the same seed"
    size = len({name for chain in chains for name in chain}) // 20
    rates = [bench.hit_rate(make(size), chains) for make in (bench.Millpond, bench.Lru)]
    assert rates[0] >= rates[1]


@pytest.mark.parametrize("make", [bench.Millpond, bench.Lru, bench.S3Fifo])
def test_a_policy_finds_what_it_just_took_and_nothing_when_it_was_flushed(make: Any) -> None:
    policy, chain = make(8), bench._grown([], ("one", 5))
    assert policy.request(chain) == 0
    assert policy.request(chain) == 5
    for number in range(30):
        other = bench._grown([], (f"other {number}", 8))
        policy.request(other)
        policy.request(other)
    assert policy.request(chain) < 5
