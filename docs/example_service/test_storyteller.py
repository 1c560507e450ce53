"""Tests of the storyteller: the whole service over a fake runtime, on asyncio and trio."""

from __future__ import annotations

import json

import pytest
from millpond.runtime import Limits, RuntimeConfig
from millpond.runtime.testing import FakeRuntime, faults
from starlette.applications import Starlette
from storyteller import STORY, make_app
from visitors import Server, serving

pytestmark = pytest.mark.anyio
LAKE = {"prompt": "Once upon a time there was a lake in the mountains, and"}
CONFIG = RuntimeConfig(
    model="teller.gguf",
    block_tokens=16,  # short blocks: a prompt of a test has some
    prefill_chunk_tokens=16,
    sliding_boundary_tokens=0,
    limits=Limits(requests_max=4, sequences_max=2, drain_s=5.0),
)


@pytest.fixture
def app(fake_runtime: FakeRuntime) -> Starlette:
    return make_app(CONFIG, fake_runtime.open)


async def figures_of(server: Server) -> dict[str, int]:
    found: dict[str, int] = json.loads(await server.get("/figures").read_all())
    return found


async def test_a_story_is_told_to_its_end(app: Starlette) -> None:
    async with serving(app) as server:
        visitor = server.post("/stories", LAKE)
        assert len(await visitor.read_all()) == STORY.max_tokens
        assert (visitor.status, visitor.is_whole) == (200, True)
        assert await figures_of(server) == {"stories": 1, "cached_tokens": 0}


@pytest.mark.parametrize("body", ["no object", {}, {"prompt": 7}, {"prompt": ""}])
async def test_a_bad_body_is_refused(app: Starlette, body: object) -> None:
    async with serving(app) as server:
        visitor = server.post("/stories", body)
        assert "error" in json.loads(await visitor.read_all())
        assert visitor.status == 400


# -- visitors who leave


async def test_a_visitor_who_leaves_in_the_middle_ends_the_story(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    """That nothing is left behind is what ``fake_runtime`` checks at the end."""
    async with serving(app) as server:
        fake_runtime.hold(after_tokens=5)
        visitor = server.post("/stories", LAKE)
        assert len(await visitor.read(letters=5)) == 5
        visitor.leave()


async def test_a_visitor_who_leaves_before_the_first_word_ends_it_too(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        fake_runtime.hold()
        visitor = server.post("/stories", LAKE)
        await fake_runtime.wait_held()
        visitor.leave()


async def test_the_others_hear_their_stories_to_the_end(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        fake_runtime.hold(after_tokens=6)
        leaving, staying = server.post("/stories", LAKE), server.post("/stories", LAKE)
        await leaving.read(letters=1)
        leaving.leave()
        fake_runtime.release()
        assert len(await staying.read_all()) == STORY.max_tokens
        assert staying.is_whole and not leaving.is_whole


# -- too many


async def test_one_too_many_is_told_to_come_back(fake_runtime: FakeRuntime, app: Starlette) -> None:
    async with serving(app) as server:
        fake_runtime.hold(after_tokens=1)
        crowd = [server.post("/stories", LAKE) for _ in range(CONFIG.limits.requests_max)]
        await fake_runtime.wait_held()
        late = server.post("/stories", LAKE)
        assert "too many" in await late.read_all()
        assert late.status == 503
        fake_runtime.release()
        for visitor in crowd:
            assert len(await visitor.read_all()) == STORY.max_tokens


# -- a bad disk


@pytest.mark.millpond_faults(faults.disk_slow("read", 0.01), faults.disk_slow("write", 0.01))
async def test_a_slow_disk_changes_no_story(app: Starlette) -> None:
    for _ in range(2):
        async with serving(app) as server:
            visitor = server.post("/stories", LAKE)
            assert len(await visitor.read_all()) == STORY.max_tokens


@pytest.mark.millpond_seeds(1, 2, 3)
@pytest.mark.millpond_faults(faults.disk_fails("write", "ENOSPC", nth=2))
async def test_a_full_disk_costs_the_cache_and_no_story(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        visitor = server.post("/stories", LAKE)
        assert len(await visitor.read_all()) == STORY.max_tokens
        health = server.get("/health")
        await health.read_all()
        assert health.status == 200


# -- restarts


async def test_after_a_restart_the_beginning_is_known(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        cold = await server.post("/stories", LAKE).read_all()
    async with serving(app) as server:
        warm = await server.post("/stories", LAKE).read_all()
        assert await figures_of(server) == {"stories": 1, "cached_tokens": 48}
    assert warm == cold
    assert fake_runtime.starts == 2


@pytest.mark.millpond_seeds(1, 2, 3)
async def test_a_crash_in_the_middle_of_a_story_leaves_the_cache(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        cold = await server.post("/stories", LAKE).read_all()
        visitor = server.post("/stories", LAKE)
        await visitor.read(letters=1)
        fake_runtime.kill()  # nothing below runs in this block
    assert fake_runtime.crashed
    async with serving(app) as server:
        assert await server.post("/stories", LAKE).read_all() == cold


async def test_a_dead_engine_shows_in_health(fake_runtime: FakeRuntime, app: Starlette) -> None:
    async with serving(app) as server:
        fake_runtime.inject(faults.thread_dies("engine", call=3))
        visitor = server.post("/stories", LAKE)
        await visitor.read_all()
        assert not visitor.is_whole
        health = server.get("/health")
        await health.read_all()
        assert health.status == 503
