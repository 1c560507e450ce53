"""The last process of a world: no faults, one request at a time, every hit as long as can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.runtime.testing.clients import Client, plain
from millpond.runtime.testing.homecoming import check_home

if TYPE_CHECKING:
    from millpond.runtime.testing.sim_house import SimHouse, SimProcess
    from millpond.runtime.testing.world import World
    from millpond.runtime.testing.world_plan import ProcessPlan, RequestPlan

ASKED_MAX = 2  # questions that are asked again


async def ask_again(world: World, process: SimProcess, plan: ProcessPlan) -> None:
    """Ask what was asked before and compare each hit with what lies on the disk (V10)."""
    await process.open_root()
    if process.root is None:
        raise world.judge.breach("V9: the root cannot be opened in quiet times")
    async with process.house(0, world.judge, world.trace) as house:
        client = Client(world, process, [house], [], f"{process.name} client")
        requests = [plain(one) for one in plan.requests[:ASKED_MAX]]
        for request in requests:
            await _ask(world, process, client, house, request)
        for request in requests[:1]:
            await _ask(world, process, client, house, request)
    check_home(world.judge, world.watch, process, [house], 0.0)
    process.root.close()
    process.disk.close()


async def _ask(
    world: World, process: SimProcess, client: Client, house: SimHouse, request: RequestPlan
) -> None:
    watch = world.watch
    best = world.oracle.boundary(house.model, request, watch.is_whole)
    hoped = world.oracle.boundary(house.model, request, lambda path: path in world.device.files)
    done = await client.ask(house, request)
    if done is None:
        raise world.judge.breach(f"V2: {request} was not answered in quiet times")
    cached = done.usage.cached_tokens
    is_more = cached > best and not done.shared_tokens
    if is_more or (cached < best and best == hoped):
        raise world.judge.breach(f"V10: {cached} tokens were cached, {best} lie whole on the disk")
    await house.store.drain(process.limits.drain_s)
