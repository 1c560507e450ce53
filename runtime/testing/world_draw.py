"""Draw a world from a seed: small, hostile, and full of prompts that share blocks."""

from __future__ import annotations

import random

import msgspec
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.schedule import seeded_random
from millpond.runtime.testing.sim_faults import ERRNOS, CrashPoint, DiskFault
from millpond.runtime.testing.workers import WorkerFault
from millpond.runtime.testing.world_plan import (
    NEVER,
    VOCAB,
    BoundsPlan,
    GroupShape,
    LayoutPlan,
    ProcessPlan,
    RequestPlan,
    WorldPlan,
)

PATIENCE_S = 700.0  # longer than a root that spills no more waits before it tries again
_BLOCK_FILE_BYTES = 1100  # about the size of a block file in these worlds


def draw_plan(seed: int) -> WorldPlan:
    """Draw a world; the same seed gives the same world."""
    draw = seeded_random("plan", seed)
    layout = _draw_layout(draw)
    prompts = _Prompts(draw, layout.block_tokens)
    blocks = draw.choice((3, 6, 10, 20, 60))
    bytes_max = blocks * _BLOCK_FILE_BYTES + draw.randrange(_BLOCK_FILE_BYTES)
    count = draw.choice((1, 2, 2))
    plan = WorldPlan(
        seed=seed,
        backend="asyncio" if draw.random() < 0.15 else "trio",
        layout=layout,
        bounds=_draw_bounds(draw),
        bytes_max=bytes_max,
        capacity_bytes=draw.choice((0, 0, 0, bytes_max, 70_000)),
        durability=draw.choice(("process", "power")),
        busy=draw.choice((0.0, 0.1, 0.4)),
        processes=tuple(_draw_process(draw, prompts) for _ in range(count)),
    )
    plan = _with_sharing(seeded_random("sharing", seed), plan)
    plan = _with_patience(seeded_random("patience", seed), plan)
    return _with_crowd(seeded_random("crowd", seed), plan)


def draw_aimed(seed: int, place: int) -> WorldPlan:
    """Draw a world on trio where an actor fails as one waits at a place, whatever else happens."""
    plan = draw_plan(seed)
    draw = seeded_random("aimed", seed)
    processes = tuple(
        msgspec.structs.replace(process, abort_place=place, together=False, **_draw_aid(draw))
        for process in plan.processes
    )
    return msgspec.structs.replace(plan, backend="trio", processes=processes)


def _draw_aid(draw: random.Random) -> dict[str, object]:
    """Draw trouble that leads to waits which few worlds reach: a thread that breaks, a bad disk."""
    match draw.randrange(4):
        case 0:
            fault = WorkerFault(call=draw.randrange(2, 8), kind=draw.choice(("stall", "die")))
            return {"engine_faults": (fault,)}
        case 1:
            kind = draw.choice(("ENOSPC", "EIO", "EROFS"))
            nth = draw.randrange(6)
            return {"disk_faults": (DiskFault(operation="write", nth=nth, kind=kind, times=2),)}
    return {}


def _with_sharing(draw: random.Random, plan: WorldPlan) -> WorldPlan:
    """Draw what concerns live caches: their bounds, choices, priorities, deadlines."""
    bounds = msgspec.structs.replace(
        plan.bounds,
        held_max=draw.choice((0, 0, 0, 1, 2, 16)),
        bypass_max=draw.choice((0, 1, 4)),
        kv_sequences=draw.choice((0.0, 0.0, 1.0, 1.5, 3.0)),
    )
    processes = tuple(
        msgspec.structs.replace(
            process, requests=tuple(_shared_request(draw, one) for one in process.requests)
        )
        for process in plan.processes
    )
    return msgspec.structs.replace(plan, bounds=bounds, processes=processes)


def _shared_request(draw: random.Random, request: RequestPlan) -> RequestPlan:
    deadline_s = draw.choice((0.001, 0.01, 0.1)) if draw.random() < 0.06 else float(NEVER)
    return msgspec.structs.replace(
        request,
        choices=draw.choice((2, 3)) if draw.random() < 0.15 else 1,
        priority=draw.choice((0, 0, 0, 1, -1)),
        deadline_s=deadline_s,
    )


def _with_patience(draw: random.Random, plan: WorldPlan) -> WorldPlan:
    """Let the last request of some processes come when a latched spilling is tried again.

    Before others start, a bit of some block rots.
    """
    processes = []
    for process in plan.processes:
        requests, faults = process.requests, process.disk_faults
        if draw.random() < 0.15:
            faults = (*faults, DiskFault(operation="claim", nth=0, kind="rot"))
        if draw.random() < 0.2 and process.close_s < 0:
            late = msgspec.structs.replace(requests[-1], start_s=PATIENCE_S)
            requests = (*requests[:-1], late)
        changed = msgspec.structs.replace(process, requests=requests, disk_faults=faults)
        processes.append(changed)
    return msgspec.structs.replace(plan, processes=tuple(processes))


def _with_crowd(draw: random.Random, plan: WorldPlan) -> WorldPlan:
    """Let the requests of some processes ask for one prompt, or for one that begins so, at once."""
    processes = []
    for process in plan.processes:
        requests = process.requests
        if draw.random() < 0.12:
            requests = _crowd(draw, process, plan.layout)
        processes.append(msgspec.structs.replace(process, requests=requests))
    return msgspec.structs.replace(plan, processes=tuple(processes))


def _crowd(
    draw: random.Random, process: ProcessPlan, layout: LayoutPlan
) -> tuple[RequestPlan, ...]:
    longest = max((one.prompt for one in process.requests), key=len)
    prompt = (longest * 3)[: 2 * layout.block_tokens * layout.chunk_blocks + 1]
    prompt = (longest + prompt)[: 5 * layout.block_tokens]
    return tuple(
        msgspec.structs.replace(
            one,
            client=number,
            prompt=prompt + one.prompt[: draw.choice((0, 0, 1))],
            start_s=draw.choice((0.0, 0.0, 0.002)) * draw.random(),
            salt="",
            choices=draw.choice((1, 1, 2, 3)),
        )
        for number, one in enumerate((*process.requests, process.requests[0]))
    )


def _draw_layout(draw: random.Random) -> LayoutPlan:
    groups: tuple[tuple[GroupShape, ...], ...] = (
        (("sliding", 2, 1), ("full", 1, 2)),
        (("full", 1, 1), ("sliding", 1, 1)),
        (("full", 2, 1),),
        (("sliding", 1, 1),),
        (("full", 1, 1), ("sliding", 1, 2), ("full", 1, 2)),
    )
    block = draw.choice((2, 4, 4, 5))
    window = draw.choice((1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 3 * block - 1))
    return LayoutPlan(
        groups=draw.choices(groups, (4, 2, 1, 1, 2))[0],
        block_tokens=block,
        chunk_blocks=draw.choice((1, 1, 1, 2)),
        boundary_chunks=draw.choice((0, 1, 2, 4)),
        window=window,
    )


def _draw_bounds(draw: random.Random) -> BoundsPlan:
    return BoundsPlan(
        requests_max=draw.choice((64, 64, 64, 2)),
        sequences_max=draw.choice((1, 2, 3)),
        channel_messages=draw.choice((1, 2, 4, 16)),
        restore_slots=draw.choice((1, 2, 4)),
        spill_slots=draw.choice((1, 2, 4, 8)),
        slot_planes=draw.choice((0, 0, 0, 1)),
        restores_max=draw.choice((1, 2, 3)),
        disk_readers=draw.choice((1, 2)),
    )


class _Prompts:
    """Prompts that share blocks, at the same place and at others."""

    def __init__(self, draw: random.Random, block_tokens: int) -> None:
        self._draw, self._block = draw, block_tokens
        self._words = [self._ids(block_tokens) for _ in range(3)]
        self._known: list[tuple[int, ...]] = []

    def prompt(self) -> tuple[int, ...]:
        """Return a prompt: asked before, a longer or shorter one, or a new one."""
        draw = self._draw
        if self._known and draw.random() < 0.6:
            prompt = draw.choice(self._known)
            if draw.random() < 0.3:
                prompt = prompt[: draw.randrange(1, len(prompt) + 1)]
            if draw.random() < 0.4:
                prompt += draw.choice(self._words)
        else:
            words = [draw.choice(self._words) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
            tail = self._ids(draw.randrange(self._block + 1))
            prompt = sum(words, ()) + tail or self._ids(1)
        prompt = prompt[: 5 * self._block]
        self._known.append(prompt)
        return prompt

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(1, VOCAB) for _ in range(count))


def _draw_process(draw: random.Random, prompts: _Prompts) -> ProcessPlan:
    models = draw.choice(((0,), (0,), (0,), (0,), (0, 1), (1,), (0, 0)))
    count = draw.choice((1, 2, 2, 3))
    requests = tuple(_draw_request(draw, prompts, len(models)) for _ in range(count))
    plan = ProcessPlan(models=models, requests=requests)
    kinds = draw.choices(
        ("none", "disk", "crash", "engine", "threads", "close", "abort", "place"),
        (10, 10, 8, 4, 3, 4, 2, 6),
    )
    together = draw.random() < 0.15
    return msgspec.structs.replace(plan, together=together, **_draw_trouble(draw, kinds[0]))


def _draw_trouble(draw: random.Random, kind: str) -> dict[str, object]:
    match kind:
        case "disk":
            return {
                "disk_faults": tuple(_draw_disk_fault(draw) for _ in range(draw.choice((1, 3))))
            }
        case "crash":
            operation = int(draw.choice((4, 15, 40, 80)) * draw.random())
            effect = draw.choice(("none", "half", "half", "all"))
            crash = CrashPoint(operation=operation, effect=effect, power=draw.random() < 0.5)
            return {"crash": crash}
        case "engine":
            kinds = ("sequence", "sequence", "restore", "restore", "bug")
            fault = ModelFault(step=draw.randrange(12), kind=draw.choice(kinds))
            stall = WorkerFault(call=draw.randrange(12), kind=draw.choice(("slow", "stall", "die")))
            if draw.random() < 0.6:
                return {"model_faults": (fault,)}
            return {"engine_faults": (stall,)}
        case "threads":
            stall = WorkerFault(call=draw.randrange(20), kind=draw.choice(("slow", "stall", "die")))
            return {draw.choice(("reader_faults", "writer_faults")): (stall,)}
        case "close":
            return {
                "close_s": 0.1 * draw.random(),
                "drain_s": draw.choice((0.0, 0.001, 0.02, 30.0)),
            }
    return {}


def _draw_request(draw: random.Random, prompts: _Prompts, houses: int) -> RequestPlan:
    leave, cancel_s, cancel_steps = NEVER, float(NEVER), NEVER
    chance = draw.random()
    if chance < 0.12:
        leave = draw.randrange(3)
    elif chance < 0.2:
        cancel_s = draw.choice((0.0, 0.001, 0.01, 0.05)) * draw.random()
    elif chance < 0.3:
        cancel_steps = int(draw.choice((4, 30, 80)) * draw.random())
    return RequestPlan(
        client=draw.randrange(3),
        house=draw.randrange(houses),
        start_s=draw.choice((0.0, 0.0, 0.01, 0.05)) * draw.random(),
        prompt=prompts.prompt(),
        salt=draw.choice(("", "", "", "tenant")),
        max_tokens=draw.choice((1, 2, 2, 2, 5, 12)),
        stop=(chr(34 + draw.randrange(VOCAB)),) if draw.random() < 0.1 else (),
        ignore_eos=draw.random() < 0.3,
        no_store=draw.random() < 0.05,
        leave_tokens=leave,
        cancel_s=cancel_s,
        cancel_steps=cancel_steps,
    )


def _draw_disk_fault(draw: random.Random) -> DiskFault:
    operation = draw.choice(("read", "read", "write", "write", "rename", "remove", "scan", "claim"))
    kinds: tuple[str, ...] = (*ERRNOS, "slow", "stuck", "rot", "rot", "vanish")
    if operation in ("read", "scan"):
        kinds = ("EIO", "EACCES", "EMFILE", "slow", "stuck", "rot", "rot", "vanish")
    if operation == "read":
        kinds += ("short", "rot", "rot", "vanish")
    elif operation in ("write", "rename", "remove"):
        kinds += ("late", "ENOSPC")
    # the first reads and scans belong to the opening of the root: most faults come later
    nth = draw.choice((0, 3, 8, 16, 30))
    return DiskFault(
        operation=operation,
        nth=nth and draw.randrange(nth),
        kind=draw.choice(kinds),
        times=draw.choice((1, 1, 1, 3, 100)),
    )
