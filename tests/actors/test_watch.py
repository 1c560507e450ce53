"""What stands still is noticed, what only waits is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from millpond.actors.store import Store
from millpond.actors.watch import OVERTAKEN_MAX, Seen, Stuck, Watch
from millpond.codecs.choices import SamplingParams
from millpond.runtime import RuntimeConfig, open_runtime
from millpond.runtime.config import Limits
from millpond.runtime.errors import HouseStuck
from millpond.runtime.testing.tiny_model import tiny_gemma3

STUCK_S = 8.0
NOTHING = Stuck(house=False, requests=())


def seen(moves: int = 0, busy: bool = False, next_id: int = 1, **at: int) -> Seen:
    requests = {int(name.removeprefix("r")): (place,) for name, place in at.items()}
    return Seen(moves=moves, is_busy=busy, next_id=next_id, requests=requests or {0: (0,)})


def looks(watch: Watch, found: Seen, first: int, count: int) -> list[Stuck]:
    return [watch.look(float(second), found) for second in range(first, first + count)]


def test_a_house_is_stuck_once_nothing_moved_for_the_bound() -> None:
    watch = Watch(STUCK_S)
    assert looks(watch, seen(), 0, 8) == [NOTHING] * 8
    assert watch.look(8.0, seen()).house


@pytest.mark.parametrize(
    "found", [seen(busy=True), Seen(moves=0, is_busy=False, next_id=5, requests={})]
)
def test_a_house_with_a_call_under_way_or_without_requests_is_not_stuck(found: Seen) -> None:
    watch = Watch(STUCK_S)
    assert looks(watch, found, 0, 40) == [NOTHING] * 40
    assert looks(watch, seen(), 40, 7) == [NOTHING] * 7


def test_a_message_now_and_then_is_enough() -> None:
    watch = Watch(STUCK_S)
    for moves in range(10):
        assert looks(watch, seen(moves=moves), 7 * moves, 7) == [NOTHING] * 7


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watch = Watch(STUCK_S)
    assert looks(watch, seen(), 0, 3) == [NOTHING] * 3
    assert watch.look(5000.0, seen()) == NOTHING
    assert watch.look(5001.0, seen()) == NOTHING


def test_a_request_is_stuck_only_if_many_that_came_later_ended_meanwhile() -> None:
    watch = Watch(STUCK_S)
    waiting = [watch.look(float(n), seen(moves=n, next_id=1 + n, r0=5)) for n in range(40)]
    assert waiting == [NOTHING] * 40
    passed = OVERTAKEN_MAX + 1
    stuck = watch.look(40.0, seen(moves=99, next_id=passed + 1, r0=5, **{f"r{passed}": 0}))
    assert stuck == Stuck(house=False, requests=(0,))


def test_a_request_that_goes_on_is_never_stuck() -> None:
    watch = Watch(STUCK_S)
    for n in range(100):
        assert watch.look(float(n), seen(moves=n, next_id=1 + 500 * n, r0=n)) == NOTHING


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.anyio
async def test_a_request_that_a_bug_loses_is_told_of_and_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without end were once seen in a soak, with nothing in health, metrics or log."""
    admit = Store._admit

    async def forgetful(self: Store, request: Any, admissions: Any) -> None:
        if request.id == 1:
            await anyio.Event().wait()
        await admit(self, request, admissions)

    monkeypatch.setattr(Store, "_admit", forgetful)
    (tmp_path / "tiny.gguf").write_bytes(tiny_gemma3())
    limits = Limits(stuck_s=0.2, drain_s=0.05)
    config = RuntimeConfig(model=str(tmp_path / "tiny.gguf"), spill=False, limits=limits)
    async with open_runtime(config) as runtime:
        one = SamplingParams(max_tokens=1)
        assert (await runtime.generate([1, 2, 3], one)).token_ids
        with pytest.raises(HouseStuck, match="nothing happened"):
            await runtime.generate([1, 2, 3], one)
        assert "nothing happened" in runtime.problem and not runtime.health().is_serving
        with pytest.raises(HouseStuck):
            await runtime.generate([1, 2, 3], one)
    assert "the house is stuck" in caplog.text and "requests {1: (0, 1, 0)}" in caplog.text
