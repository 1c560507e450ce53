"""The fake runtime: a whole house on a simulated machine, on both backends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams
from millpond.runtime.errors import (
    EngineDied,
    EngineStalled,
    InvalidParameter,
    QueueFull,
    RequestFailed,
    RuntimeClosed,
)
from millpond.runtime.testing import FakeRuntime, Leaked, SimCrash, faults, virtual_backends

pytestmark = pytest.mark.anyio
LAKE = "Once upon a time there was a lake in the mountains, and"
SHORT = SamplingParams(max_tokens=4)


@pytest.fixture(params=[*virtual_backends(), "asyncio"], ids=["trio", "asyncio", "real asyncio"])
def anyio_backend(request: Any) -> Any:
    return request.param


@pytest.fixture
def fake() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    yield made
    made.check()


async def test_text_and_ids_chats_and_choices_are_answered(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        text = await runtime.generate("Hi", SHORT)
        assert text.usage.prompt_tokens == 3
        ids = await runtime.generate([256, *b"Hi"], SHORT)
        assert (ids.text, ids.token_ids) == (text.text, text.token_ids)
        assert len(text.text) == 4 and text.finish_reason == "length"
        chat = await runtime.chat([{"role": "user", "content": "Hi"}], SHORT)
        assert chat.usage.prompt_tokens == 1 + len("user: Hi\nassistant: ")
        some = SamplingParams(max_tokens=8, temperature=1.0, logprobs=2)
        one, two = await runtime.generate_choices("Hi", 2, some)
        assert one.text != two.text and len(one.logprobs[0].top) == 2


async def test_an_answer_can_be_chosen_for_a_prompt(fake: FakeRuntime) -> None:
    fake.answers = lambda prompt: "Bern, naturally. é" if "capital" in prompt else None
    async with fake.open() as runtime:
        done = await runtime.generate("The capital?")
        assert (done.text, done.finish_reason) == ("Bern, naturally. é", "stop")
        held = SamplingParams(json_schema='{"type": "object"}')
        assert (await runtime.generate("The capital?", held)).finish_reason == "stop"
        with pytest.raises(InvalidParameter):
            await runtime.generate("The capital?", SamplingParams(json_schema="{"))


async def test_a_prompt_is_warm_after_a_restart_and_says_the_same(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        cold = await runtime.generate(LAKE, SHORT)
    assert len(fake.blocks()) > 0
    async with fake.open() as runtime:
        warm = await runtime.generate(LAKE, SHORT)
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == (len(LAKE) + 1 - 1) // 16 * 16
    assert warm.text == cold.text


async def test_another_model_finds_no_block_of_the_first(fake: FakeRuntime) -> None:
    for name, cached in (("one.gguf", 0), ("two.gguf", 0), ("one.gguf", 48)):
        config = RuntimeConfig(
            model=name, block_tokens=16, prefill_chunk_tokens=16, sliding_boundary_tokens=0
        )
        async with fake.open(config) as runtime:
            done = await runtime.generate(LAKE, SHORT)
            assert done.usage.cached_tokens == cached
            assert runtime.identity.name == name.removesuffix(".gguf")


async def test_the_model_gives_as_many_tokens_as_it_may_and_waits(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        fake.hold(after_tokens=3)
        async with runtime.stream("Hi", SHORT) as tokens:
            seen = [await anext(tokens) for _ in range(3)]
            await fake.wait_held()
            with anyio.move_on_after(0.05) as patience:
                await anext(tokens)
            assert patience.cancelled_caught and len(seen) == fake.tokens_given == 3
            fake.release()
            assert len((await tokens.result()).token_ids) == 4


async def test_leaving_a_held_stream_is_no_leak(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        fake.hold(after_tokens=1)
        async with runtime.stream("Hi") as tokens:
            await anext(tokens)
        with anyio.fail_after(30):
            while runtime.statistics().gateway.live:
                await anyio.sleep(0.01)


async def test_a_request_that_nobody_ended_is_a_leak() -> None:
    fake = FakeRuntime()
    fake.settle_s = 0.05

    async with anyio.create_task_group() as forgotten, fake.open() as runtime:
        forgotten.start_soon(_read_all, runtime, f"{LAKE} so on")
        fake.hold(after_tokens=1)
        await fake.wait_held()
    with pytest.raises(Leaked, match=r"request 0 was still running: prompt 'Once upon .*…'"):
        fake.check()


async def test_no_leak_hides_the_error_of_a_body() -> None:
    fake = FakeRuntime()
    async with anyio.create_task_group() as forgotten:
        with pytest.raises(ZeroDivisionError):
            async with fake.open() as runtime:
                forgotten.start_soon(_read_all, runtime, "Hi")
                fake.hold(after_tokens=1)
                await fake.wait_held()
                raise ZeroDivisionError
    assert fake.leaks == []


async def _read_all(runtime: Runtime, prompt: str) -> None:
    with pytest.raises(RuntimeClosed):
        await runtime.generate(prompt, SamplingParams(max_tokens=4000))


async def test_a_runtime_that_is_still_open_is_a_leak() -> None:
    fake = FakeRuntime()
    async with fake.open():
        with pytest.raises(Leaked, match="still open"):
            fake.check()
    fake.check()


async def test_a_full_house_refuses(fake: FakeRuntime) -> None:
    async with fake.open(RuntimeConfig(model="m", limits=Limits(requests_max=1))) as runtime:
        fake.hold()
        async with runtime.stream("Hi"):
            with pytest.raises(QueueFull):
                await runtime.generate("Hi")


# -- trouble


async def test_the_third_write_fails_and_the_answer_is_the_same(fake: FakeRuntime) -> None:
    planned = faults.disk_fails("write", "ENOSPC", nth=3)
    async with fake.open(faults=[planned]) as runtime:
        done = await runtime.generate(LAKE, SHORT)
        await runtime.drain()
        assert fake.injected() == {"ENOSPC write": 1}
    async with fake.open() as runtime:
        assert (await runtime.generate(LAKE, SHORT)).text == done.text


async def test_a_disk_that_is_slow_from_a_time_on_delays_no_answer(fake: FakeRuntime) -> None:
    async with fake.open(faults=[faults.disk_slow("write", 0.1, from_s=0.2)]) as runtime:
        await runtime.generate(LAKE, SHORT)
        await runtime.drain()
        assert fake.injected() == {}
        await anyio.sleep(0.2)
        await runtime.generate(f"{LAKE} another one, beside it, and then a third", SHORT)
        await runtime.drain()
        assert fake.injected()["slow write"] > 0


async def test_a_process_that_dies_leaves_its_block_and_its_disk(fake: FakeRuntime) -> None:
    reached = False
    async with fake.open(faults=[faults.process_dies(operation=57)]) as runtime:
        for number in range(50):
            await runtime.generate(f"{number} {LAKE}", SHORT)
            await runtime.drain()
        reached = True
    assert fake.crashed and not reached
    async with fake.open() as runtime:
        assert (await runtime.generate(f"0 {LAKE}", SHORT)).usage.cached_tokens > 0
    assert not fake.crashed and fake.starts == 2


async def test_a_process_that_dies_as_it_opens_says_so(fake: FakeRuntime) -> None:
    with pytest.raises(SimCrash):
        async with fake.open(faults=[faults.process_dies(operation=1)]):
            pytest.fail("it opened")
    assert fake.crashed


@pytest.mark.parametrize("power", [False, True])
async def test_kill_ends_the_process_there(fake: FakeRuntime, power: bool) -> None:
    async with fake.open() as runtime:
        done = await runtime.generate(LAKE, SHORT)
        async with runtime.stream("Hi"):
            fake.kill(power=power)
    assert fake.crashed
    async with fake.open() as runtime:
        assert (await runtime.generate(LAKE, SHORT)).text == done.text


async def test_a_thread_that_dies_fails_the_requests_and_health(fake: FakeRuntime) -> None:
    async with fake.open(faults=[faults.thread_dies("engine", call=2)]) as runtime:
        with pytest.raises(EngineDied):
            await runtime.generate("Hi", SHORT)
        assert not runtime.health().is_serving


async def test_a_thread_that_stalls_is_given_up_after_its_time(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        assert len((await runtime.generate("Hi", SHORT)).text) == 4
        fake.inject(faults.thread_stalls("engine"))
        with pytest.raises(EngineStalled):
            await runtime.generate("Hi", SHORT)


async def test_one_request_fails_and_the_next_one_is_served(fake: FakeRuntime) -> None:
    fake.inject(faults.request_fails(step=2))
    async with fake.open() as runtime:
        with pytest.raises(RequestFailed):
            await runtime.generate("Hi", SHORT)
        assert len((await runtime.generate("Hi", SHORT)).text) == 4


async def test_a_bug_ends_the_runtime(fake: FakeRuntime) -> None:
    with pytest.raises(ArithmeticError):
        async with fake.open(faults=[faults.model_breaks(step=1)]) as runtime:
            await runtime.generate("Hi", SHORT)


async def test_rot_is_a_miss_and_never_a_wrong_answer(fake: FakeRuntime) -> None:
    async with fake.open() as runtime:
        cold = await runtime.generate(LAKE, SHORT)
    async with fake.open(faults=[faults.block_rots(before="claim")]) as runtime:
        assert (await runtime.generate(LAKE, SHORT)).text == cold.text


async def test_a_small_disk_serves_on(fake: FakeRuntime) -> None:
    fake.device.capacity_bytes = 6000
    async with fake.open() as runtime:
        for number in range(8):
            assert len((await runtime.generate(f"{number} {LAKE}", SHORT)).text) == 4
        await runtime.drain()
    assert fake.device.used_bytes <= 6000


# -- fault scripts as data


def test_a_fault_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        faults.disk_fails("write", nth=0)
    with pytest.raises(ValueError, match="expected one of scan, read"):
        faults.disk_fails("wirte")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of ENOSPC"):
        faults.disk_fails("write", "ENOENT")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a process dies once"):
        faults.trouble_of([faults.process_dies(operation=1), faults.process_dies(operation=2)])
    with pytest.raises(TypeError, match="expected a fault"):
        faults.trouble_of(["disk full"])  # type: ignore[list-item]


def test_the_harness_needs_no_mlx_and_importing_it_is_nothing() -> None:
    program = (
        "import sys; sys.modules['mlx'] = None\n"
        "import millpond.runtime.testing.plugin\n"
        "ours = [n for n in sys.modules if n.startswith('millpond')]\n"
        "assert len(ours) == 4, ours\n"
        "import anyio\n"
        "from millpond.runtime.testing import FakeRuntime\n"
        "async def main():\n"
        "    async with FakeRuntime().open() as runtime:\n"
        "        print((await runtime.generate('Hi')).finish_reason)\n"
        "anyio.run(main)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("length\n", "")
