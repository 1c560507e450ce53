"""The model pool over fake models: load, evict, fail, wait, close."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.errors import (
    ConfigError,
    ModelUnavailable,
    ModelUnreadable,
    PoolBusy,
    RuntimeClosed,
    UnknownModel,
)
from millpond.runtime.pool import ModelPool, PoolSettings, open_pool
from millpond.runtime.testing.fake_served import FakeServed


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class World:
    """Opens fakes; remembers what was opened and closed."""

    folder: Path
    events: list[str] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    gates: dict[str, anyio.Event] = field(default_factory=dict)
    dying: dict[str, anyio.Event] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    fakes: dict[str, FakeServed] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[FakeServed]:
        name = Path(path).stem
        self.events.append(f"+{name}")
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.failing:
            raise self.failing[name]
        fake = self.fakes[name] = FakeServed()
        try:
            async with anyio.create_task_group() as group:
                if name in self.dying:

                    async def die() -> None:
                        await self.dying[name].wait()
                        raise LookupError("a bug")

                    group.start_soon(die)
                yield fake
                group.cancel_scope.cancel()
        finally:
            self.events.append(f"-{name}")

    def measure(self, path: str) -> int:
        return self.sizes.get(Path(path).stem, 1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    for name in "abc":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    return World(tmp_path)


def opened(world: World, **settings: float | None) -> AbstractAsyncContextManager[ModelPool]:
    catalogue = Catalogue([], str(world.folder))
    chosen = PoolSettings(**settings)  # type: ignore[arg-type]
    return open_pool(catalogue, chosen, world.open, world.measure)


async def use(pool: ModelPool, name: str) -> None:
    async with pool.acquire(name):
        pass


async def until(condition: object) -> None:
    assert callable(condition)
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_model_is_loaded_once_and_kept(world: World) -> None:
    async with opened(world) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(use, pool, "a")
        await use(pool, "a")
        assert world.events == ["+a"]
        assert pool.statistics().users == 0
    assert world.events == ["+a", "-a"]


@pytest.mark.anyio
async def test_the_least_recently_used_model_makes_room(world: World) -> None:
    async with opened(world, models_max=2) as pool:
        for name in "abac":
            await use(pool, name)
        assert world.events == ["+a", "+b", "-b", "+c"]
        assert pool.statistics().evictions == 1


@pytest.mark.anyio
async def test_requests_of_an_evicted_model_finish_first(world: World) -> None:
    async with opened(world, models_max=1) as pool:
        async with pool.acquire("a"), anyio.create_task_group() as group:
            group.start_soon(use, pool, "b")
            await until(lambda: pool.statistics().evictions)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert world.events == ["+a"]
            group.cancel_scope.cancel()
        await until(lambda: world.events == ["+a", "-a"])
        await use(pool, "b")
        assert world.events[-1] == "+b"


@pytest.mark.anyio
async def test_two_models_that_both_are_wanted_take_turns(world: World) -> None:
    done: list[str] = []

    async def often(pool: ModelPool, name: str) -> None:
        for _ in range(20):
            await use(pool, name)
            done.append(name)

    async with opened(world, models_max=1) as pool, anyio.create_task_group() as group:
        for name in "aabbc":
            group.start_soon(often, pool, name)
    assert len(done) == 100


@pytest.mark.anyio
async def test_memory_bounds_what_is_loaded_and_a_model_beyond_it_is_refused(world: World) -> None:
    world.sizes = {"a": 6, "b": 5, "c": 11}
    async with opened(world, memory_bytes_max=10) as pool:
        await use(pool, "a")
        await use(pool, "b")
        assert world.events == ["+a", "-a", "+b"]
        assert pool.statistics().memory_bytes == 5
        with pytest.raises(ModelUnavailable, match="11 bytes"):
            await use(pool, "c")
        assert world.events == ["+a", "-a", "+b"]


@pytest.mark.anyio
async def test_a_model_that_fails_to_load_fails_its_requests_only(world: World) -> None:
    world.failing["b"] = ModelUnreadable("b: broken")
    async with opened(world) as pool, pool.acquire("a"):
        failures = []

        async def fail() -> None:
            with pytest.raises(ModelUnavailable, match="b: broken") as caught:
                await use(pool, "b")
            failures.append(caught.value)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(fail)
        assert len(failures) == 3 and world.events == ["+a", "+b"]
        with pytest.raises(ModelUnavailable):
            await use(pool, "b")  # not tried again at once
        assert world.events == ["+a", "+b"]


@pytest.mark.anyio
async def test_a_model_is_tried_again_after_a_while(world: World) -> None:
    world.failing["b"] = ModelUnreadable("b: broken")
    async with opened(world, retry_s=0) as pool:
        with pytest.raises(ModelUnavailable):
            await use(pool, "b")
        world.failing.clear()
        await use(pool, "b")


@pytest.mark.anyio
async def test_a_bug_in_one_house_ends_it_and_no_other(world: World) -> None:
    world.dying["a"] = anyio.Event()
    async with opened(world, retry_s=0) as pool:
        async with pool.acquire("b"), pool.acquire("a"):
            world.dying.pop("a").set()
            await until(lambda: "-a" in world.events)
        await use(pool, "b")
        await use(pool, "a")
        assert world.events == ["+b", "+a", "-a", "+a"]
        assert pool.statistics().users == 0


@pytest.mark.anyio
async def test_a_model_whose_engine_died_is_replaced(world: World) -> None:
    async with opened(world) as pool:
        await use(pool, "a")
        world.fakes["a"].problem = "engine: stalled"
        await use(pool, "a")
        assert world.events == ["+a", "-a", "+a"]


@pytest.mark.anyio
async def test_waiting_for_a_model_has_a_bound_in_time_and_number(world: World) -> None:
    world.gates["a"] = anyio.Event()
    async with opened(world, load_wait_s=0.05, waiters_max=1) as pool:
        async with anyio.create_task_group() as group:

            async def too_long() -> None:
                with pytest.raises(PoolBusy, match="within"):
                    await use(pool, "a")

            group.start_soon(too_long)
            await until(lambda: pool.statistics().waiting)
            with pytest.raises(PoolBusy, match="1 requests wait"):
                await use(pool, "a")
        world.gates.pop("a").set()
        await use(pool, "a")


@pytest.mark.anyio
async def test_a_waiter_that_is_cancelled_leaves_no_trace(world: World) -> None:
    world.gates["a"] = anyio.Event()
    async with opened(world) as pool:
        for _ in range(10):
            async with anyio.create_task_group() as group:
                group.start_soon(use, pool, "a")
                await until(lambda: pool.statistics().waiting)
                group.cancel_scope.cancel()
        world.gates["a"].set()
        await use(pool, "a")
        assert pool.statistics().users == 0 and world.events == ["+a"]
        assert await pool.unload("a") and not await pool.unload("a")


@pytest.mark.anyio
async def test_an_idle_model_is_closed_after_its_time(world: World) -> None:
    async with opened(world, keep_alive_s=0.02) as pool:
        async with pool.acquire("a"):
            pass
        await until(lambda: world.events == ["+a", "-a"])
        await pool.preload("b")
        pool.keep("b", -1)
        await use(pool, "c")
        await until(lambda: "-c" in world.events)
        assert "-b" not in world.events


@pytest.mark.anyio
async def test_closing_ends_those_that_wait(world: World) -> None:
    world.gates["a"] = anyio.Event()
    outcome: list[str] = []

    async def wait(pool: ModelPool) -> None:
        try:
            await use(pool, "a")
        except RuntimeClosed:
            outcome.append("closed")

    async with anyio.create_task_group() as group:
        async with opened(world, close_s=0.05) as pool:
            group.start_soon(wait, pool)
            await until(lambda: pool.statistics().waiting)
        await until(lambda: outcome)
    with pytest.raises(RuntimeClosed):
        await use(pool, "b")


@pytest.mark.anyio
async def test_states_are_told(world: World) -> None:
    async with opened(world) as pool:
        await use(pool, "b")
        assert [(one.name, one.state) for one in await pool.entries()] == [
            ("a", "unloaded"),
            ("b", "ready"),
            ("c", "unloaded"),
        ]
        with pytest.raises(UnknownModel, match="a, b, c"):
            await pool.resolve("d")


def test_a_catalogue_finds_new_files_skips_later_parts_and_refuses_twins(tmp_path: Path) -> None:
    catalogue = Catalogue([], str(tmp_path))
    with pytest.raises(UnknownModel, match="none"):
        catalogue.resolve(None)
    for name in ("x.gguf", "y-00001-of-00002.gguf", "y-00002-of-00002.gguf", "z.txt", "../x"):
        if "/" not in name:
            (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.gguf").mkdir()
    assert catalogue.resolve("x") == "x"
    assert [one.name for one in catalogue.scan()] == ["x", "y-00001-of-00002"]
    with pytest.raises(UnknownModel):
        catalogue.resolve("../x")
    with pytest.raises(ConfigError):
        Catalogue([("a", "1"), ("a", "2")])
    with pytest.raises(ConfigError):
        Catalogue([], str(tmp_path / "nowhere"))
