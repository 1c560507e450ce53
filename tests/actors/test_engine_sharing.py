"""Live caches that are shared: prefixes in flight, finished turns, choices; all in virtual time."""

from __future__ import annotations

import anyio
import pytest
from fake_house import CHUNK, CHUNK_S, FULL_ONLY, LAYOUT, opened, prompt, settle
from fake_house import prompt_of as asked
from millpond.codecs.messages import Drop
from millpond.runtime.config import Limits
from millpond.runtime.errors import RequestFailed
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.results import Completion
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.schedule import Backend, run_seeded

BOTH: tuple[Backend, ...] = ("trio", "asyncio")
LAYOUTS = pytest.mark.parametrize("layout", [LAYOUT, FULL_ONLY], ids=["sliding", "full"])


def alone(ids: list[int], layout: KvLayout = LAYOUT, **more: object) -> Completion:
    async def main() -> Completion:
        async with opened(layout=layout) as house:
            return await house.ask(ids, **more)

    return run_seeded(main, 1)


def everywhere(main: object) -> None:
    for backend in BOTH:
        for seed in range(3):
            run_seeded(main, seed, backend)  # type: ignore[arg-type]


@LAYOUTS
def test_a_new_prefix_that_two_requests_have_is_prefilled_once(layout: KvLayout) -> None:
    first, second = prompt(22), [*prompt(20)[:18], 9, 9]
    expected = [alone(first, layout).token_ids, alone(second, layout).token_ids]

    async def main() -> None:
        async with opened(layout=layout) as house:
            found = await house.ask_all(first, second)
            figures = house.engine.statistics()
        assert [one.token_ids for one in found] == expected
        assert [one.usage.cached_tokens for one in found] == [0, 16]
        assert [one.shared_tokens for one in found] == [0, 16]
        assert figures.prefilled_tokens == 22 + (20 - 16)

    everywhere(main)


def test_requests_of_other_salts_or_without_a_store_share_nothing() -> None:
    async def main() -> None:
        async with opened() as house:
            async with anyio.create_task_group() as group:
                for more in ({}, {"salt": "a"}, {"salt": "b"}, {"no_store": True}):
                    group.start_soon(lambda more=more: house.ask(prompt(21), **more))
                    await settle()
            for more in ({"salt": "c"}, {"no_store": True}):
                done = await house.ask(prompt(21), **more)
                assert (done.usage.cached_tokens, done.shared_tokens) == (0, 0)
            assert house.engine.statistics().prefilled_tokens == 6 * 21

    everywhere(main)


@LAYOUTS
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 2.5])
def test_followers_take_over_from_a_leader_that_is_cancelled(
    layout: KvLayout, after_s: float
) -> None:
    ids = prompt(40)
    expected = alone(ids, layout).token_ids

    async def main() -> None:
        async with opened(layout=layout) as house:
            async with anyio.create_task_group() as group:

                async def follow() -> None:
                    assert (await house.ask(ids)).token_ids == expected

                with anyio.move_on_after(after_s * CHUNK_S):
                    async with house.gateway.stream(asked(ids)) as tokens:
                        group.start_soon(follow)
                        group.start_soon(follow)
                        await tokens.result()
            prefilled = house.engine.statistics().prefilled_tokens
        # the chunk that ran when the leader left is kept, and each follower reads the last one
        assert prefilled <= 40 + CHUNK

    everywhere(main)


def test_followers_take_over_from_a_leader_that_fails() -> None:
    ids = prompt(30)
    expected = alone(ids).token_ids

    async def main() -> None:
        async with opened(faults=(ModelFault(step=3, kind="sequence"),)) as house:
            failed = 0
            async with anyio.create_task_group() as group:

                async def one() -> None:
                    nonlocal failed
                    try:
                        assert (await house.ask(ids)).token_ids == expected
                    except RequestFailed:
                        failed += 1

                for _ in range(4):
                    group.start_soon(one)
            assert failed == 1
            prefilled = house.engine.statistics().prefilled_tokens
        assert prefilled <= 3 * CHUNK + 30 + 2 * CHUNK

    everywhere(main)


@LAYOUTS
def test_the_next_turn_begins_with_the_live_cache_of_the_one_before(layout: KvLayout) -> None:
    async def main() -> None:
        async with opened(layout=layout) as house:
            ids, cached = prompt(21), 0
            for turn in range(4):
                done = await house.ask(ids)
                assert done.token_ids == alone_of[tuple(ids)]
                assert done.usage.cached_tokens == done.shared_tokens == cached
                assert done.restore.blocks == 0
                cached = len(ids) // CHUNK * CHUNK
                ids = [*ids, *done.token_ids, *prompt(7, seed=turn + 1)]
            assert house.engine.statistics().held >= 1

    alone_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    ids = prompt(21)
    for turn in range(4):
        alone_of[tuple(ids)] = alone(ids, layout).token_ids
        ids = [*ids, *alone_of[tuple(ids)], *prompt(7, seed=turn + 1)]
    everywhere(main)


def test_the_same_prompt_again_reads_its_last_chunk_only() -> None:
    async def main() -> None:
        async with opened() as house:
            for length in (20, 21, 23):
                ids = prompt(length, seed=length)
                first = await house.ask(ids)
                again = await house.ask(ids)
                assert again.token_ids == first.token_ids
                assert again.usage.cached_tokens == (length - 1) // CHUNK * CHUNK

    everywhere(main)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_held_caches_are_dropped_by_the_store_beyond_their_number(kept: int) -> None:
    async def main() -> None:
        async with opened(Limits(held_max=kept)) as house:
            for seed in range(5):
                await house.ask(prompt(12, seed))
            await house.quiet()
            assert house.engine.statistics().held == kept == len(house.model.caches)
            dropped = [one.request_id for one in house.messages if isinstance(one, Drop)]
            assert dropped == list(range(5 - kept))
            found = [(await house.ask(prompt(12, 4))).shared_tokens]
            assert found == [8 if kept else 0]

    everywhere(main)


def test_held_caches_make_room_for_a_request_that_needs_their_memory() -> None:
    budget = LAYOUT.live_bytes(60)

    async def main() -> None:
        async with opened(kv_bytes_max=budget) as house:
            await house.ask(prompt(30))
            await house.quiet()
            assert house.store.statistics().memory.held == 1
            done = await house.ask(prompt(57, seed=2))
            assert done.usage.cached_tokens == 0
            figures = house.store.statistics().memory
            assert figures.dropped == 1
            assert figures.claimed_bytes + figures.held_bytes <= budget

    everywhere(main)


def test_choices_share_the_whole_prompt_and_begin_in_the_same_step() -> None:
    ids = prompt(21)
    expected = alone(ids).token_ids

    async def main() -> None:
        async with opened() as house:
            async with house.gateway.stream_choices(asked(ids), 4) as streams:
                found = [await tokens.result() for tokens in streams]
            assert [one.token_ids for one in found] == [expected] * 4
            assert [one.usage.cached_tokens for one in found] == [0, 21, 21, 21]
            assert house.engine.statistics().prefilled_tokens == 21
            assert len([step for step in house.model.done if step.decodes]) == 2

    everywhere(main)


def test_choices_beyond_the_engines_places_begin_with_the_prompts_chunks() -> None:
    ids = prompt(21)
    expected = alone(ids).token_ids

    async def main() -> None:
        limits = Limits(sequences_max=2, restores_max=1)
        async with opened(limits) as house:
            async with house.gateway.stream_choices(asked(ids, no_store=False), 5) as streams:
                found = [await tokens.result() for tokens in streams]
            assert [one.token_ids for one in found] == [expected] * 5
            assert sorted(one.usage.cached_tokens for one in found) == [0, 20, 20, 20, 21]

    everywhere(main)


@pytest.mark.parametrize("no_store", [False, True])
def test_choices_go_on_when_the_first_is_left(no_store: bool) -> None:
    ids = prompt(30)
    expected = alone(ids).token_ids

    async def main() -> None:
        async with opened() as house:
            async with house.gateway.stream_choices(asked(ids, no_store=no_store), 3) as streams:
                await anyio.sleep(2.5 * CHUNK_S)
                streams[0].leave()
                with pytest.raises(RequestFailed, match="cancelled"):
                    await streams[0].result()
                found = [await tokens.result() for tokens in streams[1:]]
            assert [one.token_ids for one in found] == [expected] * 2
            kept = [0] if no_store else [8, 12]
            least, most = sorted(one.usage.cached_tokens for one in found)
            assert least in kept and most == 30

    everywhere(main)
