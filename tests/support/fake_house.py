"""A whole house in virtual time: the real actors, no disk, the fake model, and steps that last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import msgspec
from millpond.actors.engine import Engine, EngineParts
from millpond.actors.gateway import Gateway, GatewayParts, Prompt
from millpond.actors.store import Store, StoreParts
from millpond.actors.supervisor import HouseParts, open_house
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.messages import ToEngine, ToGateway
from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.results import Completion
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import Step, StepResult
from millpond.runtime.testing.fake_model import FakeModel, ModelFault
from millpond.runtime.testing.oracle import END_ID, FINGERPRINT, Letters, guard_of, weights_of
from millpond.runtime.testing.sim_house import SimLoader
from millpond.runtime.testing.workers import InlineWorker
from millpond.runtime.testing.world_plan import VOCAB, ProcessPlan

T = TypeVar("T")
CHUNK = 4
CONTEXT = 200
CHUNK_S, DECODE_S = 0.1, 0.01
SLIDING = LayerGroup(0, LayerType.SLIDING, 1, 4, KvDType.F16, (0, 1))
FULL = LayerGroup(1, LayerType.FULL, 2, 4, KvDType.F16, (2,))
LAYOUT = KvLayout((SLIDING, FULL), CHUNK, CHUNK, 6, CHUNK)
FULL_ONLY = KvLayout((LayerGroup(0, LayerType.FULL, 2, 4, KvDType.F16, (0,)),), CHUNK, CHUNK, 6, 0)


class PacedModel(FakeModel):
    """Knows how long its last step took, and remembers its steps."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.done: list[Step] = []
        self.took_s = 0.0

    def run(self, step: Step) -> StepResult:
        self.done.append(step)
        self.took_s = CHUNK_S * len(step.prefills) + DECODE_S * bool(step.decodes)
        return super().run(step)


@dataclass
class PacedWorker:
    """Calls last as long as the model says."""

    model: PacedModel
    name: str = "engine"

    async def call(self, function: Callable[[], T], stall_s: float | None = None) -> T:
        with anyio.CancelScope(shield=True):
            self.model.took_s = 0.0
            result = function()
            await anyio.sleep(self.model.took_s)
        await anyio.lowlevel.checkpoint()
        return result


@dataclass
class FakeHouse:
    gateway: Gateway
    engine: Engine
    store: Store
    model: PacedModel
    messages: list[Any] = field(default_factory=list)

    def admitted(self) -> list[int]:
        """The ids of the requests that the engine was sent, in order."""
        return [one.request_id for one in self.messages if type(one).__name__ == "Admit"]

    async def ask(self, prompt: list[int], **more: Any) -> Completion:
        async with self.gateway.stream(prompt_of(prompt, **more)) as tokens:
            return await tokens.result()

    async def ask_all(self, *prompts: list[int], **more: Any) -> list[Completion]:
        found: dict[int, Completion] = {}

        async def one(place: int, prompt: list[int]) -> None:
            found[place] = await self.ask(prompt, **more)

        async with anyio.create_task_group() as group:
            for place, prompt in enumerate(prompts):
                group.start_soon(one, place, prompt)
                await settle()
        return [found[place] for place in range(len(prompts))]

    async def quiet(self) -> None:
        """Wait until nothing runs, and the engine did what was left to do."""
        while self.gateway.statistics().live:
            await anyio.sleep(0.01)
        await anyio.sleep(0.01)


async def settle() -> None:
    """Let everybody run who can, without a step of the engine coming to its end."""
    await anyio.sleep(1e-6)


def prompt_of(prompt: list[int], **more: Any) -> Prompt:
    names = SamplingParams.__struct_fields__
    chosen = {name: more.pop(name) for name in list(more) if name in names}
    sampling = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | chosen)
    return Prompt(content=prompt, sampling=sampling, **more)


@dataclass(frozen=True)
class Plan:
    """What a house is made of."""

    limits: Limits
    layout: KvLayout
    kv_bytes_max: int | None
    model: PacedModel
    worker: Any
    pools: list[StagingPool]

    @property
    def context(self) -> int:
        if self.kv_bytes_max is None:
            return CONTEXT
        return self.layout.tokens_within(self.kv_bytes_max, CONTEXT)

    def engine(self) -> Engine:
        return Engine(
            EngineParts(
                runner=self.model,
                thread=self.worker,
                layout=self.layout,
                context_tokens=self.context,
                end_ids=frozenset({END_ID}),
                weight_pool=self.pools[0],
                restore_pool=self.pools[1],
                spill_pool=self.pools[2],
                limits=self.limits,
                clock=anyio.current_time,
            )
        )

    def store(self) -> Store:
        return Store(
            StoreParts(
                layout=self.layout,
                fingerprint=FINGERPRINT,
                guard=guard_of(0),
                limits=self.limits,
                root=None,
                readers=(InlineWorker(),),
                writer=InlineWorker(),
                restore_pool=self.pools[1],
                spill_pool=self.pools[2],
                clock=anyio.current_time,
                context_tokens=self.context,
                kv_bytes_max=self.kv_bytes_max,
            )
        )

    def gateway(self) -> Gateway:
        return Gateway(
            GatewayParts(
                tokenizer=Letters(),
                thread=InlineWorker(),
                fingerprint=FINGERPRINT,
                guard=guard_of(0),
                reuse="exact",
                block_tokens=CHUNK,
                context_tokens=CONTEXT,
                limits=self.limits,
                clock=anyio.current_time,
                memory_tokens=self.context,
            )
        )


@asynccontextmanager
async def opened(
    limits: Limits | None = None,
    layout: KvLayout = LAYOUT,
    kv_bytes_max: int | None = None,
    faults: tuple[ModelFault, ...] = (),
    worker: Any = None,
) -> AsyncIterator[FakeHouse]:
    model = PacedModel(layout, VOCAB, faults=faults)
    largest = max(group.block_bytes(CHUNK) for group in layout.groups)
    pools = [
        StagingPool("weights", 1, 32),
        StagingPool("restore", 4, largest),
        StagingPool("spill", 4, largest),
    ]
    plan = Plan(
        limits or Limits(), layout, kv_bytes_max, model, worker or PacedWorker(model), pools
    )
    found = FakeHouse(plan.gateway(), plan.engine(), plan.store(), model)
    decoders = {
        "admissions": msgspec.msgpack.Decoder(ToEngine).decode,
        "tokens": msgspec.msgpack.Decoder(ToGateway).decode,
    }

    def tap(arrow: str, data: bytes) -> None:
        if arrow in decoders:
            found.messages.append(decoders[arrow](data))

    parts = HouseParts(
        gateway=found.gateway,
        store=found.store,
        engine=found.engine,
        loader=SimLoader(weights_of(0), pools[0], ProcessPlan()),
        limits=plan.limits,
        tap=tap,
    )
    async with open_house(parts):
        yield found
    assert not model.left_behind, "a live cache was never freed"
    assert all(pool.statistics().lent == 0 for pool in pools), "a slot did not come home"


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids from 1 to 47 that tell seed and place."""
    return [1 + (seed * 17 + place * 5 + place // 7) % 47 for place in range(tokens)]
