"""Order, bounds and ends of many requests, in virtual time: a chunk lasts 0.1 s, a decode 0.01 s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise

import anyio
import pytest
from fake_house import CHUNK, CHUNK_S, DECODE_S, LAYOUT, FakeHouse, opened, prompt, settle
from fake_house import prompt_of as asked
from millpond.runtime.config import Limits
from millpond.runtime.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineError,
    EngineStalled,
    InvalidParameter,
    KvMemoryExceeded,
    QueueFull,
)
from millpond.runtime.testing.schedule import Backend, run_seeded
from millpond.runtime.testing.workers import SimWorker, WorkerFault

BOTH: tuple[Backend, ...] = ("trio", "asyncio")
STEP_S = CHUNK_S + DECODE_S
INSTANT = 1e-3  # what ``settle`` and the like add


def everywhere(main: Callable[[], Awaitable[None]], seeds: int = 3) -> None:
    for backend in BOTH:
        for seed in range(seeds):
            run_seeded(main, seed, backend)


async def times_of(house: FakeHouse, ids: list[int], **more: object) -> list[float]:
    """When each token came."""
    async with house.gateway.stream(asked(ids, **more)) as tokens:
        return [anyio.current_time() async for _ in tokens]


def test_between_two_tokens_of_an_answer_lie_one_chunk_and_one_decode_at_most() -> None:
    async def main() -> None:
        limits = Limits(sequences_max=4)
        async with opened(limits) as house:
            gaps: list[float] = []

            async def answer(seed: int) -> None:
                found = await times_of(house, prompt(6, seed), max_tokens=60)
                gaps.extend(after - before for before, after in pairwise(found))

            async with anyio.create_task_group() as group:
                group.start_soon(answer, 1)
                group.start_soon(answer, 2)
                await anyio.sleep(0.5)
                for seed in range(3, 12):  # long prompts, more than fit at once, some cancelled
                    more = {"max_tokens": 2, "deadline_s": 2.0 if seed % 3 else None}
                    group.start_soon(_ask_or_late, house, prompt(80, seed), more)
            assert len(gaps) == 2 * 59
            assert max(gaps) <= STEP_S + INSTANT
            assert max(gaps) >= STEP_S - INSTANT  # chunks did run between

    everywhere(main)


async def _ask_or_late(house: FakeHouse, ids: list[int], more: dict[str, object]) -> None:
    try:
        await house.ask(ids, **more)
    except DeadlineExceeded:
        assert more["deadline_s"] is not None


def test_a_short_prompt_passes_a_long_one_and_does_not_starve_it() -> None:
    limits = Limits(sequences_max=3, bypass_max=2)
    chunks = 20

    async def main() -> None:
        async with opened(limits) as house, anyio.create_task_group() as group:
            first = await _start(group, house, prompt(chunks * CHUNK, 1))
            others = [await _start(group, house, prompt(2, 2))]
            await anyio.sleep(2.5 * CHUNK_S + 2 * DECODE_S)
            assert others[0].is_set(), "the short one did not pass"
            for seed in range(3, 60):
                others.append(await _start(group, house, prompt(CHUNK, seed)))
            await first.wait()
            steps = sum(bool(step.prefills) for step in house.model.done)
            assert steps <= chunks * (limits.bypass_max + limits.sequences_max)
            assert not all(one.is_set() for one in others)
            group.cancel_scope.cancel()

    everywhere(main)


async def _start(group: object, house: FakeHouse, ids: list[int], **more: object) -> anyio.Event:
    done = anyio.Event()

    async def run() -> None:
        await house.ask(ids, max_tokens=1, **more)
        done.set()

    group.start_soon(run)  # type: ignore[attr-defined]
    await settle()
    return done


def test_the_higher_priority_goes_first_and_the_lower_one_is_not_passed_over_for_ever() -> None:
    limits = Limits(sequences_max=1, restores_max=1, bypass_max=3)

    async def main() -> None:
        async with opened(limits) as house:
            async with anyio.create_task_group() as group:
                for seed, priority in enumerate((0, 0, -5, 0, *[7] * 8)):
                    await _start(group, house, prompt(9, seed), priority=priority)
            order = house.admitted()
        # two had their place before anybody else came
        assert order == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9, 10, 11]

    everywhere(main)


def test_the_most_urgent_prompt_is_read_first_and_lends_its_urgency_to_its_leader() -> None:
    shared = prompt(40, 1)

    async def main() -> None:
        async with opened() as house, anyio.create_task_group() as group:
            slow = await _start(group, house, prompt(12, 9))
            await _start(group, house, shared, priority=-1)
            urgent = await _start(group, house, [*shared, 3], priority=5)
            other = await _start(group, house, prompt(24, 3), priority=1)
            await urgent.wait()
            assert not other.is_set() or not slow.is_set()
            assert house.engine.statistics().shared_tokens == 40

    everywhere(main)


def test_admission_waits_for_memory_and_every_request_gets_its_turn() -> None:
    budget = int(2.5 * LAYOUT.live_bytes(23))

    async def main() -> None:
        async with opened(kv_bytes_max=budget) as house:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    figures = house.store.statistics().memory
                    assert figures.claimed_bytes + figures.held_bytes <= budget
                    most = max(most, figures.claims)
                    await anyio.sleep(0.02)

            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                done = await house.ask_all(*[prompt(20, seed) for seed in range(12)])
                group.cancel_scope.cancel()
            assert len(done) == 12
            assert most == 2

    everywhere(main, seeds=2)


def test_what_can_never_fit_is_refused_at_once_with_its_numbers() -> None:
    async def main() -> None:
        async with opened(Limits(requests_max=3), kv_bytes_max=LAYOUT.live_bytes(30)) as house:
            with pytest.raises(KvMemoryExceeded, match="found 30 tokens, expected at most 29"):
                await house.ask(prompt(30))
            done = await house.ask(prompt(28), max_tokens=9)
            assert (len(done.token_ids), done.finish_reason) == (2, "length")
            async with house.gateway.stream_choices(asked(prompt(9)), 2):
                with pytest.raises(QueueFull, match="found 2 requests in the house and 2 more"):
                    async with house.gateway.stream_choices(asked(prompt(9)), 2):
                        pass
            for more in ({"priority": 101}, {"deadline_s": 0}, {"deadline_s": float("nan")}):
                with pytest.raises(InvalidParameter, match=next(iter(more))):
                    await house.ask(prompt(3), **more)
            for choices in (0, 1025, True):
                with pytest.raises(InvalidParameter, match="n: found"):
                    async with house.gateway.stream_choices(asked(prompt(9)), choices):
                        pass

    everywhere(main, seeds=1)


# -- deadlines and cancellations


@pytest.mark.parametrize(
    "after_s", [0.05, 0.25, 0.45, 0.95], ids=["queued", "read", "end", "decode"]
)
def test_a_deadline_ends_a_request_wherever_it_is(after_s: float) -> None:
    limits = Limits(sequences_max=1, restores_max=1)

    async def main() -> None:
        async with opened(limits) as house:
            waits = after_s == 0.05
            if waits:
                limits_of = [house.gateway.stream(asked(prompt(30, seed))) for seed in (1, 2)]
            started = anyio.current_time()
            async with anyio.create_task_group() as group:
                if waits:
                    for one in limits_of:
                        group.start_soon(_hold_open, one)
                    await settle()
                with pytest.raises(DeadlineExceeded, match="found no end within"):
                    await house.ask(prompt(17), max_tokens=100, deadline_s=after_s)
                assert anyio.current_time() - started <= after_s + INSTANT
                group.cancel_scope.cancel()
            await house.quiet()
            assert anyio.current_time() - started <= after_s + 2 * STEP_S + 0.03
            assert house.store.statistics().memory.claims == 0
            assert (await house.ask(prompt(5))).finish_reason == "length"

    everywhere(main)


async def _hold_open(stream: object) -> None:
    async with stream as tokens:  # type: ignore[attr-defined]
        await tokens.result()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.35, 0.55, 0.9, 1.2])
def test_a_cancelled_request_stops_within_one_step_and_its_blocks_stay(after_s: float) -> None:
    async def main() -> None:
        async with opened(Limits(sequences_max=2, restores_max=1)) as house:
            async with anyio.create_task_group() as group:
                for seed in range(4):
                    group.start_soon(_leave_after, house, prompt(18, seed), after_s)
            left_at = anyio.current_time()
            while house.gateway.statistics().live:
                await anyio.sleep(0.001)
            assert anyio.current_time() - left_at <= STEP_S + 0.002
            assert house.store.statistics().memory.claims == 0

    everywhere(main)


async def _leave_after(house: FakeHouse, ids: list[int], seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await house.ask(ids, max_tokens=100)


# -- a broken thread


@pytest.mark.parametrize("kind", ["stall", "die"])
def test_a_broken_thread_fails_everything_pending_at_once_with_its_error(kind: str) -> None:
    error: type[EngineError] = EngineStalled if kind == "stall" else EngineDied
    limits = Limits(
        engine_stall_s=5.0, engine_warm_s=5.0, sequences_max=2, restores_max=1, requests_max=9
    )

    async def main() -> None:
        worker = SimWorker("engine", 1, faults=(WorkerFault(call=6, kind=kind),))
        ends: list[float] = []
        async with opened(limits, worker=worker) as house:

            async def one(seed: int) -> None:
                with pytest.raises(error):
                    await house.ask(prompt(40, seed), max_tokens=50)
                ends.append(anyio.current_time())

            async with anyio.create_task_group() as group:
                for seed in range(9):  # running, waiting at the engine, waiting for memory
                    group.start_soon(one, seed)
            assert len(ends) == 9
            assert max(ends) - min(ends) < 1.0
            assert str(house.engine.statistics().problem) != ""
            with pytest.raises(error):
                await house.ask(prompt(3))
            await house.quiet()
            assert house.store.statistics().memory.claims == 0

    everywhere(main)
