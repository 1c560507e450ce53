"""What takes minutes, in virtual time: when nothing can run, time jumps to the next deadline."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import current_time
from millpond.runtime.testing import FakeRuntime, faults, virtual_backends
from starlette.applications import Starlette
from storyteller import STORY, make_app
from test_storyteller import CONFIG, LAKE, figures_of
from visitors import serving

pytestmark = pytest.mark.anyio


@pytest.fixture(params=virtual_backends(), ids=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def app(fake_runtime: FakeRuntime) -> Starlette:
    return make_app(CONFIG, fake_runtime.open)


@pytest.mark.millpond_faults(faults.disk_slow("write", 20.0))
async def test_no_story_waits_for_a_slow_disk(fake_runtime: FakeRuntime, app: Starlette) -> None:
    async with serving(app) as server:
        started = current_time()
        story = await server.post("/stories", LAKE).read_all()
        assert len(story) == STORY.max_tokens
        assert current_time() - started < 1
        assert len(fake_runtime.blocks()) <= 1  # the first write is still under way


async def test_what_a_slow_disk_gives_back_is_the_same_story(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        cold = await server.post("/stories", LAKE).read_all()
    fake_runtime.inject(faults.disk_slow("read", 5.0))
    async with serving(app) as server:
        assert await server.post("/stories", LAKE).read_all() == cold
        assert (await figures_of(server))["cached_tokens"] == 48


async def test_a_stuck_engine_is_found_after_its_time(
    fake_runtime: FakeRuntime, app: Starlette
) -> None:
    async with serving(app) as server:
        await server.post("/stories", LAKE).read_all()
        fake_runtime.inject(faults.thread_stalls("engine"))
        started = current_time()
        visitor = server.post("/stories", LAKE)
        await visitor.read_all()
        assert not visitor.is_whole
        assert current_time() - started >= CONFIG.limits.engine_stall_s
        health = server.get("/health")
        await health.read_all()
        assert health.status == 503
