"""Gateway, engine and supervisor over real arrows, with a scripted model and a store without a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from millpond.actors.engine import Engine, EngineParts
from millpond.actors.gateway import Gateway, GatewayParts, Prompt
from millpond.actors.supervisor import House, HouseParts, open_house
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Held,
    Loaded,
    RestoreReport,
    Submit,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.config import Limits
from millpond.runtime.errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineStalled,
    InvalidParameter,
    ModelUnreadable,
    QueueFull,
    RequestFailed,
    RuntimeClosed,
)
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import Sampled, Step, StepResult
from millpond.runtime.threads import PinnedThread

pytestmark = pytest.mark.anyio
LIMITS = Limits()
LAYOUT = KvLayout((LayerGroup(0, LayerType.FULL, 1, 4, KvDType.F32, (0,)),), 4, 4, 1, 4)
CONTEXT, END, VOCAB = 100, 250, 256


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Script:
    """A model whose next id is the one before plus one; records its steps."""

    steps: list[Step] = field(default_factory=list)
    before: Callable[[Step], None] = lambda step: None
    fail: dict[int, str] = field(default_factory=dict)

    def load_rows(self, tensor: Any, payload: memoryview) -> None:
        raise AssertionError("this model has no weights")

    def finish_load(self) -> None: ...

    def close(self) -> None: ...

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.before(step)
        sampled = []
        for chunk in step.prefills:
            if chunk.sample is not None:
                sampled.append(Sampled(chunk.sequence_id, chunk.token_ids[-4] + 1))
        for decode in step.decodes:
            sampled.append(Sampled(decode.sequence_id, decode.token_id + 1))
        involved = {one.sequence_id for one in (*step.prefills, *step.decodes)}
        failures = {key: text for key, text in self.fail.items() if key in involved}
        kept = tuple(one for one in sampled if one.sequence_id not in failures)
        return StepResult(kept, tuple(b"x" * 16 for _ in step.snapshots), failures=failures)


class PassingStore:
    """Admits everything cold; gives every offer back."""

    def __init__(self, pool: StagingPool) -> None:
        self.pool, self.offers = pool, 0
        self.held: dict[int, tuple[int, ...]] = {}

    async def run(self, submissions: Inbox[Any], offers: Inbox[Any], out: Outbox[Any]) -> None:
        async with anyio.create_task_group() as loops:
            loops.start_soon(self._offers, offers)
            async with submissions, out:
                async for message in submissions:
                    await out.send(self._answer(message))

    async def _offers(self, offers: Inbox[Any]) -> None:
        async with offers:
            async for message in offers:
                if isinstance(message, Held):
                    self.held[message.request_id] = message.boundaries
                    continue
                self.pool.give(message.slot, message.lease)
                self.offers += 1

    def _answer(self, message: Submit | Cancel) -> Admit | Cancel:
        if isinstance(message, Cancel):
            return message
        return Admit(
            request_id=message.request_id,
            token_ids=message.token_ids,
            root=message.root,
            chain=message.chain,
            sampling=message.sampling,
            prefix_tokens=0,
            restored=RestoreReport(),
        )


class Loader:
    def __init__(self, error: str = "") -> None:
        self.error = error

    async def run(self, weights: Outbox[Any]) -> None:
        async with weights:
            await weights.send(Loaded(tensors=0, error=self.error))


class Letters:
    """Ids are Latin-1 code points."""

    vocab_size = VOCAB

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode("latin-1"))

    def detokenizer(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


@dataclass
class Built:
    house: House
    gateway: Gateway
    engine: Engine
    script: Script
    store: PassingStore
    pools: list[StagingPool]


@asynccontextmanager
async def opened(
    script: Script | None = None, limits: Limits = LIMITS, loader: Loader | None = None
) -> AsyncIterator[Built]:
    script = script or Script()
    pools = [StagingPool(name, 4, 256) for name in ("weights", "restore", "spill")]
    async with PinnedThread("engine", close_s=0.2) as thread, PinnedThread("host") as host:
        engine = Engine(
            EngineParts(
                runner=script,
                thread=thread,
                layout=LAYOUT,
                context_tokens=CONTEXT,
                end_ids=frozenset({END}),
                weight_pool=pools[0],
                restore_pool=pools[1],
                spill_pool=pools[2],
                limits=limits,
                clock=time.monotonic,
            )
        )
        gateway = Gateway(
            GatewayParts(
                tokenizer=Letters(),
                thread=host,
                fingerprint=b"f" * 32,
                guard=b"g" * 32,
                reuse="exact",
                block_tokens=4,
                context_tokens=CONTEXT,
                limits=limits,
                clock=time.monotonic,
            )
        )
        store = PassingStore(pools[2])
        parts = HouseParts(
            gateway=gateway, store=store, engine=engine, loader=loader or Loader(), limits=limits
        )
        async with open_house(parts) as house:
            yield Built(house, gateway, engine, script, store, pools)
    assert all(pool.statistics().lent == 0 for pool in pools), "a slot did not come home"


async def ask(built: Built, text: str, **sampling: Any) -> Any:
    prompt = Prompt(content=text, sampling=SamplingParams(**sampling))
    async with built.gateway.stream(prompt) as tokens:
        return await tokens.result()


async def test_a_prompt_goes_in_and_its_completion_comes_out() -> None:
    async with opened() as built:
        done = await ask(built, "!", max_tokens=3)
    assert done.text == '"#$'
    assert done.token_ids == (34, 35, 36)
    assert done.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1, 3)


async def test_the_terminating_id_is_counted_and_ends_the_completion() -> None:
    async with opened() as built:
        done = await ask(built, chr(END - 2), max_tokens=9)
        more = await ask(built, chr(END - 2), max_tokens=4, ignore_eos=True)
    assert done.token_ids == (END - 1, END)
    assert done.finish_reason == "stop"
    assert more.token_ids == (END - 1, END, END + 1, END + 2)


async def test_prefill_lies_on_the_grid_and_only_whole_chunks_are_offered() -> None:
    async with opened() as built:
        await ask(built, "abcdefghij", max_tokens=1)
        chunks = [chunk for step in built.script.steps for chunk in step.prefills]
        snapshots = [one for step in built.script.steps for one in step.snapshots]
    assert [(c.first_token, len(c.token_ids) // 4) for c in chunks] == [(0, 4), (4, 4), (8, 2)]
    assert [chunk.sample is not None for chunk in chunks] == [False, False, True]
    assert [one.first_token for one in snapshots] == [0, 4]
    assert built.store.offers == 2


async def test_a_stop_string_is_never_seen_in_part() -> None:
    async with opened() as built:
        prompt = Prompt(content="a", sampling=SamplingParams(max_tokens=20, stop=("efg", "ez")))
        async with built.gateway.stream(prompt) as tokens:
            seen = [token.text async for token in tokens]
            done = await tokens.result()
    assert "".join(seen) == "bcd" == done.text
    assert done.finish_reason == "stop"
    assert done.token_ids == tuple(map(ord, "bcdefg"))


async def test_held_back_text_comes_out_when_no_stop_string_follows() -> None:
    async with opened() as built:
        done = await ask(built, "a", max_tokens=5, stop=("fgX",))
    assert done.text == "bcdef"
    assert done.finish_reason == "length"


async def test_leaving_a_stream_stops_the_request_within_a_step() -> None:
    async with opened() as built:
        prompt = Prompt(content="a", sampling=SamplingParams(max_tokens=90, ignore_eos=True))
        async with built.gateway.stream(prompt) as tokens:
            await tokens.__anext__()
        while built.gateway.statistics().live:
            await anyio.sleep(0.001)
        assert built.gateway.statistics().ended == {"cancelled": 1}
        assert len(built.script.steps) < 90


async def test_requests_share_the_engine_and_do_not_mix() -> None:
    async with opened() as built:
        results: dict[str, str] = {}

        async def one(letter: str) -> None:
            results[letter] = (await ask(built, letter * 9, max_tokens=8)).text

        async with anyio.create_task_group() as group:
            for letter in "ADGJMPSV":
                group.start_soon(one, letter)
    for letter, text in results.items():
        assert text == "".join(chr(ord(letter) + 1 + k) for k in range(8))


async def test_more_requests_than_the_limit_are_refused() -> None:
    async with opened(limits=Limits(requests_max=1)) as built:
        prompt = Prompt(content="a", sampling=SamplingParams(max_tokens=50, ignore_eos=True))
        async with built.gateway.stream(prompt):
            with pytest.raises(QueueFull):
                await ask(built, "b")


async def test_bad_requests_fail_alone_and_clearly() -> None:
    async with opened() as built:
        with pytest.raises(EmptyPrompt):
            await ask(built, "")
        with pytest.raises(ContextExceeded, match="found 100 tokens, expected at most 99"):
            await ask(built, "x" * CONTEXT)
        with pytest.raises(InvalidParameter, match="temperature"):
            await ask(built, "x", temperature=-1.0)
        with pytest.raises(InvalidParameter, match="expected an integer from 0 to 255"):
            async with built.gateway.stream(Prompt(content=[1, 256])):
                pass
        with pytest.raises(EmptyPrompt):
            async with built.gateway.stream(Prompt(content=[])):
                pass
        bad: tuple[Any, ...] = (5, None, b"x", {1})
        for content in bad:
            with pytest.raises(InvalidParameter, match="expected a text or a sequence"):
                async with built.gateway.stream(Prompt(content=content)):
                    pass
        for salt in ("\ud800", b"x"):
            with pytest.raises(InvalidParameter, match="salt"):
                async with built.gateway.stream(Prompt(content="x", salt=salt)):  # type: ignore[arg-type]
                    pass
        assert (await ask(built, "a", max_tokens=1)).text == "b"


async def test_a_fault_in_one_request_never_reaches_another() -> None:
    async with opened(Script(fail={0: "odd"})) as built:
        with pytest.raises(RequestFailed, match="odd"):
            await ask(built, "a", max_tokens=3)
        assert (await ask(built, "a", max_tokens=3)).text == "bcd"


async def test_the_context_bounds_a_completion() -> None:
    async with opened() as built:
        done = await ask(built, "!" * (CONTEXT - 2), max_tokens=50, ignore_eos=True)
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 2


async def test_a_stalled_thread_fails_every_request_with_a_typed_error() -> None:
    gate = threading.Event()
    limits = Limits(engine_stall_s=0.05, engine_warm_s=0.05)
    try:
        async with opened(Script(before=lambda step: gate.wait(5) and None), limits) as built:
            async with anyio.create_task_group() as group:

                async def one() -> None:
                    with pytest.raises(EngineStalled):
                        await ask(built, "abcdefgh")

                group.start_soon(one)
                group.start_soon(one)
            assert "longer than" in built.engine.statistics().problem
            with pytest.raises(EngineStalled):
                await ask(built, "a")
    finally:
        gate.set()


async def test_a_bug_on_the_pinned_thread_ends_the_house_with_its_own_error() -> None:
    def fail(step: Step) -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError, match="bug"):
        async with opened(Script(before=fail)) as built:
            await ask(built, "a")


async def test_a_model_that_cannot_load_raises_its_own_error() -> None:
    with pytest.raises(ModelUnreadable, match="half a file"):
        async with opened(loader=Loader("half a file")):
            raise AssertionError("the house must not open")


async def test_an_error_of_the_body_leaves_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with opened():
            raise KeyError("mine")


async def test_closing_ends_running_requests_with_runtime_closed() -> None:
    errors: list[BaseException] = []

    async def one(built: Built, started: anyio.Event) -> None:
        prompt = Prompt(content="a", sampling=SamplingParams(max_tokens=90, ignore_eos=True))
        try:
            async with built.gateway.stream(prompt) as tokens:
                await tokens.__anext__()
                started.set()
                await tokens.result()
        except RuntimeClosed as error:
            errors.append(error)

    script = Script(before=lambda step: time.sleep(0.001))
    async with anyio.create_task_group() as outside, opened(script) as built:
        started = anyio.Event()
        outside.start_soon(one, built, started)
        await started.wait()
    assert len(errors) == 1


async def test_cancelling_the_body_closes_the_house_in_order() -> None:
    with anyio.CancelScope() as scope:
        async with opened() as built:
            await ask(built, "abcdefgh", max_tokens=1)
            scope.cancel()
            await anyio.sleep(1)
    assert scope.cancelled_caught
    assert built.store.offers == 2
