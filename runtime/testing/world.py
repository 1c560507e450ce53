"""``World``: runs a planned world with the real actors and checks every invariant on the way.

    result = run_world(draw_plan(17))
    assert result.violation is None

After the planned processes a last one without faults asks again, in quiet, what was asked before.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from anyio import (
    Event,
    create_task_group,
    current_time,
    get_cancelled_exc_class,
    move_on_after,
    sleep,
)
from millpond.runtime.errors import EngineError
from millpond.runtime.testing.cancellations import Place, actor_places
from millpond.runtime.testing.clients import Client, client_of
from millpond.runtime.testing.fake_model import ModelBug
from millpond.runtime.testing.homecoming import check_home, check_root
from millpond.runtime.testing.invariants import (
    DiskWatch,
    Judge,
    Violation,
    leaves_of,
    story_of,
)
from millpond.runtime.testing.oracle import Oracle
from millpond.runtime.testing.quiet_end import ask_again
from millpond.runtime.testing.schedule import Probe, Probes, Spinning, run_seeded
from millpond.runtime.testing.sim_device import SimDevice
from millpond.runtime.testing.sim_disk import SimDisk
from millpond.runtime.testing.sim_faults import SimCrash
from millpond.runtime.testing.sim_house import (
    Abort,
    ActorFailed,
    SimHouse,
    SimProcess,
    context_tokens,
)
from millpond.runtime.testing.trace import Trace
from millpond.runtime.testing.world_plan import ProcessPlan, RequestPlan, WorldPlan

PATIENCE_S = 100_000.0  # virtual; nothing in a house waits that long
LATE_S = 1.0  # a stuck call comes back that much after the last request


@dataclass(slots=True)
class WorldResult:
    """How a world went.

    violation  the first breach, None if there was none
    digest     of the trace
    injected   faults by kind
    outcomes   requests by how they ended
    cached_tokens, shared_tokens, events  tokens that hits gave, those of live caches among them,
                entries of the trace
    """

    violation: str | None = None
    digest: str = ""
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    events: int = 0
    shared_tokens: int = 0


def run_world(
    plan: WorldPlan, lines: list[str] | None = None, probe: Probe | None = None
) -> WorldResult:
    """Run a world to its end or to its first violation.

    lines  gets the readable trace
    probe  called with trio's task where a cancellation is delivered
    """
    world = World(plan, lines)
    try:
        after = world.look_at if any(one.abort_place >= 0 for one in plan.processes) else None
        run_seeded(world.run, plan.seed, plan.backend, Probes(probe, after))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        world.result.violation = story_of(error)
    return world.close()


class World:
    """One device and the processes that use it."""

    def __init__(self, plan: WorldPlan, lines: list[str] | None = None) -> None:
        self._plan = plan
        self._layout = plan.layout.layout()
        self.device = SimDevice(plan.seed, plan.capacity_bytes or None)
        self.oracle = Oracle(self._layout, context_tokens(self._layout))
        self.judge = Judge()
        self.watch = DiskWatch(self.judge, self.device, self.oracle, plan.bytes_max)
        self.result = WorldResult()
        self.trace = Trace(self._now, lines)
        # mutable state, changed only in run
        self._running = False
        self._abort: tuple[Place, Abort] | None = None
        for process in plan.processes:
            for request in process.requests:
                self.oracle.learn(process.models[request.house], request)

    async def run(self) -> None:
        """Run every process, then the quiet end."""
        self._running = True
        for together in _side_by_side(self._plan.processes):
            self.watch.alone = len(together) == 1
            async with create_task_group() as processes:
                for name, process in together:
                    processes.start_soon(self._live, name, process)
        self.watch.alone = True
        await self._end_quietly()

    def close(self) -> WorldResult:
        """Return the result."""
        self._running = False
        self.result.violation = self.judge.first or self.result.violation
        self.result.injected.update(self.device.losses)
        self.result.digest, self.result.events = self.trace.digest(), self.trace.events
        return self.result

    def look_at(self, task: Any) -> None:
        """After a task step: fail an actor, or cancel a caller, that waits where it is planned."""
        if self._abort is not None and self._abort[0].holds(task):
            client, abort = client_of(task), self._abort[1]
            self._abort = None
            if client is not None:
                client.cancel()
                return
            self.result.injected["actor failed"] += 1
            abort.now()

    def _now(self) -> float:
        return current_time() if self._running else 0.0

    # -- one process

    async def _live(self, name: str, plan: ProcessPlan) -> None:
        disk = SimDisk(self.device, plan.disk_faults, plan.crash, self._see)
        process = SimProcess(self._plan, plan, disk, name)
        self.watch.process_starts()
        self.trace.event(name, f"starts: {self.device!r}")
        places = actor_places()
        if plan.abort_place >= 0:
            self._abort = (places[plan.abort_place % len(places)], process.abort)
        try:
            with move_on_after(PATIENCE_S) as patience:
                await self._serve(process, plan)
            if patience.cancelled_caught:
                raise self.judge.breach("V2: something waits for ever")
        except BaseException as error:
            self._judge(error, process, plan)
        finally:
            self._abort = None
            self._count(process)
        if disk.crashed:
            self.trace.event(name, f"is dead: {self.device!r}")
            self.watch.after_crash(disk.lost_power, self._plan.durability)

    async def _serve(self, process: SimProcess, plan: ProcessPlan) -> None:
        await process.open_root()
        async with create_task_group() as callers:
            done = Event()
            async with AsyncExitStack() as stack:
                houses = [
                    await stack.enter_async_context(process.house(number, self.judge, self.trace))
                    for number in range(len(plan.models))
                ]
                clients = self._clients(process, houses, plan)
                for client in clients:
                    callers.start_soon(client.run)
                callers.start_soon(_wait_all, clients, done)
                with move_on_after(plan.close_s if plan.close_s >= 0 else math.inf):
                    await done.wait()
                for house in houses:
                    await house.store.drain(plan.drain_s)
                if any(worker.stuck for worker in process.workers()):
                    await sleep(LATE_S)
                    for worker in process.workers():
                        worker.come_back()
                closing_s = current_time()
                for client in clients:
                    client.is_closing = True
            took_s = current_time() - closing_s
        check_home(self.judge, self.watch, process, houses, took_s)
        if process.root is not None:
            process.root.close()
        process.disk.close()

    def _clients(
        self, process: SimProcess, houses: list[SimHouse], plan: ProcessPlan
    ) -> list[Client]:
        by_client: dict[int, list[RequestPlan]] = {}
        for request in plan.requests:
            by_client.setdefault(request.client, []).append(request)
        return [
            Client(self, process, houses, requests, f"{process.name} client{number}")
            for number, requests in by_client.items()
        ]

    def _judge(self, error: BaseException, process: SimProcess, plan: ProcessPlan) -> None:
        """A process may end by its planned crash or bug, or a broken thread, and nothing else."""
        disk = process.disk
        broken = any(thread.statistics().broken for thread in process.engine_threads)
        leaves = list(leaves_of(error))
        for leaf in leaves:
            if isinstance(leaf, Violation | Spinning):
                self.judge.explain(story_of(one) for one in leaves if one is not leaf)
                raise leaf
        cancelled = get_cancelled_exc_class()
        for leaf in leaves:
            if isinstance(leaf, SimCrash) and disk.crashed:
                continue
            planned = any(fault.kind == "bug" for fault in plan.model_faults)
            if isinstance(leaf, ModelBug) and planned:
                continue
            if isinstance(leaf, ActorFailed) and plan.aborts:
                continue
            if isinstance(leaf, EngineError) and broken:
                continue
            if isinstance(leaf, cancelled):
                raise leaf
            raise self.judge.breach(f"a process ended with {story_of(leaf)}") from leaf
        if not disk.crashed:
            if process.root is not None and self.watch.alone:
                check_root(self.judge, process.root)
            disk.close()

    def _count(self, process: SimProcess) -> None:
        self.result.injected.update(process.disk.injected)
        for worker in process.workers():
            self.result.injected.update(worker.injected)
        for runner in process.runners:
            self.result.injected.update(runner.injected)

    def _see(self, operation: str, path: str, target: str) -> None:
        self.trace.event("disk", f"{operation} {path} {target}")
        self.watch.see(operation, path, target)

    # -- the end

    async def _end_quietly(self) -> None:
        for number, model in enumerate(sorted(self._models())):
            requests = self._asked_of(model)
            plan = ProcessPlan(models=(model,), requests=tuple(requests))
            disk = SimDisk(self.device, watch=self._see)
            process = SimProcess(self._plan, plan, disk, f"end{number}")
            self.watch.process_starts()
            with move_on_after(PATIENCE_S) as patience:
                await ask_again(self, process, plan)
            if patience.cancelled_caught:
                raise self.judge.breach("V2: something waits for ever at the quiet end")

    def _models(self) -> set[int]:
        return {model for process in self._plan.processes for model in process.models}

    def _asked_of(self, model: int) -> list[RequestPlan]:
        found: dict[tuple[object, ...], RequestPlan] = {}
        for process in self._plan.processes:
            for request in process.requests:
                if process.models[request.house] == model and not request.no_store:
                    found.setdefault((request.prompt, request.salt), request)
        return list(found.values())


def _side_by_side(
    processes: tuple[ProcessPlan, ...],
) -> list[list[tuple[str, ProcessPlan]]]:
    """Cut the processes into those that run at the same time."""
    found: list[list[tuple[str, ProcessPlan]]] = []
    for number, process in enumerate(processes):
        if not found or not process.together:
            found.append([])
        found[-1].append((f"p{number}", process))
    return found


async def _wait_all(clients: list[Client], done: Event) -> None:
    for client in clients:
        await client.ended.wait()
    done.set()
