"""``SimProcess``: one simulated process with its disk, threads, spill root and houses.

The actors are the real ones; the runner, the threads and the disk are simulated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from anyio import CancelScope, current_time
from anyio.lowlevel import checkpoint
from millpond.actors.engine import Engine, EngineParts
from millpond.actors.gateway import Gateway, GatewayParts
from millpond.actors.store import Store, StoreParts
from millpond.actors.supervisor import House, HouseParts, open_house
from millpond.codecs.messages import Loaded, Tensor, Weights
from millpond.runtime.channels import Outbox
from millpond.runtime.config import Limits
from millpond.runtime.errors import EngineError, SpillError
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.kv.root import RootOptions, SpillRoot
from millpond.runtime.staging import StagingPool
from millpond.runtime.testing.fake_model import FakeModel
from millpond.runtime.testing.invariants import ArrowWatch, Judge
from millpond.runtime.testing.oracle import END_ID, FINGERPRINT, Letters, guard_of, weights_of
from millpond.runtime.testing.sim_disk import SimDisk
from millpond.runtime.testing.trace import Trace
from millpond.runtime.testing.workers import InlineWorker, Pace, SimWorker
from millpond.runtime.testing.world_plan import VOCAB, ProcessPlan, WorldPlan

DISK_STALL_S, ENGINE_STALL_S = 60.0, 120.0
OPEN_STALL_S = 10 * DISK_STALL_S


class ActorFailed(ArithmeticError):
    """What a planned bug in an actor raises; it must end the house."""


class Abort:
    """Cuts off the actors of a process where they wait, as the failure of a neighbour does.

    The failure itself is raised by the first actor that is gone.
    """

    def __init__(self) -> None:
        # mutable state, changed only in the methods below
        self._scopes: list[CancelScope] = []
        self._called = self._raised = False

    def now(self) -> None:
        """Cut them off; what waits for a whole house at this moment is cancelled there."""
        self._called = True
        for scope in self._scopes:
            scope.cancel()

    def around(self, run: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Return an actor's ``run`` that can be cut off."""

        async def abortable(*ends: object) -> None:
            with CancelScope() as scope:
                self._scopes.append(scope)
                await run(*ends)
            if self._called and not self._raised:
                self._raised = True
                raise ActorFailed("planned")

        return abortable


class SimLoader:
    """Sends the fake model's weights; fails after a number of turns if told to.

    Where an actor is planned to fail they come as two tensors through one slot, so one waits.
    """

    def __init__(self, weights: bytes, pool: StagingPool, plan: ProcessPlan) -> None:
        count = 2 if plan.aborts else 1
        size = len(weights) // count
        self._tensors = [weights[size * index : size * (index + 1)] for index in range(count)]
        self._pool, self._abort_steps = pool, plan.abort_steps

    async def run(self, weights: Outbox[Weights]) -> None:
        """Send, then say so, then perhaps fail."""
        async with weights:
            for number, part in enumerate(self._tensors):
                await self._send(f"w{number}", part, weights)
            await weights.send(Loaded(tensors=len(self._tensors)))
        if self._abort_steps >= 0:
            for _ in range(self._abort_steps):
                await checkpoint()
            raise ActorFailed("planned")

    async def _send(self, name: str, part: bytes, weights: Outbox[Weights]) -> None:
        lease = await self._pool.lend(len(part))
        lease.buffer[:] = part
        await weights.send(
            Tensor(
                name=name,
                shape=(1, len(part) // 4),
                encoding="f32",
                first_row=0,
                rows=1,
                slot=lease.slot,
                lease=lease.lease,
                payload_bytes=len(part),
            )
        )


@dataclass(frozen=True, slots=True)
class SimHouse:
    """A running house and what the world looks at."""

    number: int
    model: int
    house: House
    engine: Engine
    store: Store
    runner: FakeModel
    pools: tuple[StagingPool, ...]
    arrows: ArrowWatch


class SimProcess:
    """What the houses of one process share.

    root  None until ``open_root`` succeeded
    """

    def __init__(self, world: WorldPlan, plan: ProcessPlan, disk: SimDisk, name: str) -> None:
        self._world, self.plan, self.disk, self.name = world, plan, disk, name
        self.layout = world.layout.layout()
        self.limits = _limits(world, plan)
        pace = Pace(share=world.busy)
        seed = world.seed
        self.readers = tuple(
            SimWorker(
                f"reader{index}",
                seed + index,
                pace,
                plan.reader_faults if not index else (),
                disk.take_delay,
            )
            for index in range(world.bounds.disk_readers)
        )
        self.writer = SimWorker("writer", seed + 7, pace, plan.writer_faults, disk.take_delay)
        self.engine_threads = tuple(
            SimWorker(f"engine{index}", seed + 20 + index, pace, plan.engine_faults * (not index))
            for index in range(len(plan.models))
        )
        self.kv_bytes_max: int | None = None
        if world.bounds.kv_sequences:
            longest = self.layout.live_bytes(context_tokens(self.layout))
            self.kv_bytes_max = int(world.bounds.kv_sequences * longest)
        self.root: SpillRoot | None = None
        self.runners: list[FakeModel] = []
        self.abort = Abort()

    async def open_root(self) -> None:
        """Open the spill root as a runtime does; a root that cannot be used is none."""
        options = RootOptions(
            token=f"w{self.name}",
            bytes_max=self._world.bytes_max,
            quarantine_bytes_max=self._world.bytes_max,
            stall_s=DISK_STALL_S,
            sync=self._world.durability == "power",
        )
        try:
            self.root = await self.writer.call(
                partial(SpillRoot.open, self.disk, options), OPEN_STALL_S
            )
        except (SpillError, EngineError):
            self.root = None

    @asynccontextmanager
    async def house(self, number: int, judge: Judge, trace: Trace) -> AsyncIterator[SimHouse]:
        """Run one house."""
        model = self.plan.models[number]
        tag = f"{self.name}.{number}"
        arrows = ArrowWatch(judge, lambda arrow, data: trace.message(f"{tag} {arrow}", data))
        faults = self.plan.model_faults if not number else ()
        runner = FakeModel(self.layout, VOCAB, faults=faults)
        self.runners.append(runner)
        pools = _pools(self.layout, self._world)
        gateway = Gateway(self._gateway_parts(model))
        engine = Engine(self._engine_parts(number, runner, pools))
        store = Store(self._store_parts(model, pools))
        loader = SimLoader(weights_of(model), pools[0], self.plan)
        if self.plan.abort_place >= 0:
            for actor in (gateway, store, engine, loader):
                setattr(actor, "run", self.abort.around(actor.run))  # noqa: B010
        parts = HouseParts(
            gateway=gateway,
            store=store,
            engine=engine,
            loader=loader,
            limits=self.limits,
            tap=arrows.see,
        )
        async with open_house(parts) as house:
            yield SimHouse(number, model, house, engine, store, runner, pools, arrows)

    def workers(self) -> tuple[SimWorker, ...]:
        """Return every simulated thread."""
        return (*self.readers, self.writer, *self.engine_threads)

    def _engine_parts(
        self, number: int, runner: FakeModel, pools: tuple[StagingPool, ...]
    ) -> EngineParts:
        return EngineParts(
            runner=runner,
            thread=self.engine_threads[number],
            layout=self.layout,
            context_tokens=context_tokens(self.layout),
            end_ids=frozenset({END_ID}),
            weight_pool=pools[0],
            restore_pool=pools[1],
            spill_pool=pools[2],
            limits=self.limits,
            clock=current_time,
        )

    def _store_parts(self, model: int, pools: tuple[StagingPool, ...]) -> StoreParts:
        return StoreParts(
            layout=self.layout,
            fingerprint=FINGERPRINT,
            guard=guard_of(model),
            limits=self.limits,
            root=self.root,
            readers=self.readers,
            writer=self.writer,
            restore_pool=pools[1],
            spill_pool=pools[2],
            clock=current_time,
            context_tokens=context_tokens(self.layout),
            kv_bytes_max=self.kv_bytes_max,
        )

    def _gateway_parts(self, model: int) -> GatewayParts:
        return GatewayParts(
            tokenizer=Letters(),
            thread=InlineWorker("host"),
            fingerprint=FINGERPRINT,
            guard=guard_of(model),
            reuse="exact",
            block_tokens=self.layout.block_tokens,
            context_tokens=context_tokens(self.layout),
            limits=self.limits,
            clock=current_time,
        )


def context_tokens(layout: KvLayout) -> int:
    """Return the context of the fake model: the longest prompt, and a completion that it cuts."""
    return 5 * layout.block_tokens + 8


def _limits(world: WorldPlan, plan: ProcessPlan) -> Limits:
    bounds = world.bounds
    return Limits(
        requests_max=bounds.requests_max,
        sequences_max=bounds.sequences_max,
        channel_messages=bounds.channel_messages,
        restore_slots=bounds.restore_slots,
        spill_slots=bounds.spill_slots,
        restores_max=bounds.restores_max,
        disk_readers=bounds.disk_readers,
        held_max=bounds.held_max,
        bypass_max=bounds.bypass_max,
        engine_stall_s=ENGINE_STALL_S,
        engine_warm_s=ENGINE_STALL_S,
        disk_stall_s=DISK_STALL_S,
        drain_s=plan.drain_s,
    )


def _pools(layout: KvLayout, world: WorldPlan) -> tuple[StagingPool, ...]:
    bounds, tokens = world.bounds, layout.block_tokens
    largest = max(group.block_bytes(tokens) for group in layout.groups)
    plane = max(group.plane_bytes(tokens) for group in layout.groups)
    slot_bytes = min(largest, bounds.slot_planes * plane) or largest
    return (
        StagingPool("weights", 1, 32),
        StagingPool("restore", bounds.restore_slots, slot_bytes),
        StagingPool("spill", bounds.spill_slots, slot_bytes),
    )
