"""What happens in a simulated world, as plain data: drawn from a seed, printable, shrinkable.

A world is one disk and the processes that use it, one after another.  Each opens the spill root,
serves its requests in one house or two, and ends: closed, killed, or without power.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.schedule import Backend, seeded_random
from millpond.runtime.testing.sim_disk import ERRNOS, CrashPoint, DiskFault
from millpond.runtime.testing.workers import WorkerFault

VOCAB = 48  # ids; 0 ends a completion
NEVER = -1
_BLOCK_FILE_BYTES = 1100  # about the size of a block file in these worlds
GroupShape = tuple[Literal["full", "sliding"], int, int]  # kind, layers, kv_heads


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the fake model's cache; ``chunk_blocks`` and ``boundary_chunks`` give the grid."""

    groups: tuple[GroupShape, ...]
    block_tokens: int
    chunk_blocks: int
    boundary_chunks: int
    window: int

    def layout(self) -> KvLayout:
        """Return the layout."""
        groups, layer = [], 0
        for index, (kind, layers, heads) in enumerate(self.groups):
            numbers = tuple(range(layer, layer + layers))
            layer += layers
            groups.append(LayerGroup(index, LayerType(kind), heads, 4, KvDType.F16, numbers))
        chunk = self.block_tokens * self.chunk_blocks
        return KvLayout(
            tuple(groups), self.block_tokens, chunk, self.window, chunk * self.boundary_chunks
        )


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    client         requests of one client follow each other, clients run side by side
    house          index of the house in its process
    start_s        pause before it
    prompt         token ids
    salt, max_tokens, stop, ignore_eos, no_store  as in the API
    leave_tokens   leave the stream after so many tokens; -1: read to the end
    cancel_s       cancel the caller after so long; -1: never
    """

    client: int
    house: int
    start_s: float
    prompt: tuple[int, ...]
    salt: str = ""
    max_tokens: int = 3
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    no_store: bool = False
    leave_tokens: int = NEVER
    cancel_s: float = NEVER


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    models         weights of its houses, by number
    requests       what is asked
    close_s        close the houses at that time, whatever runs; -1: after the last request
    drain_s        time to drain then
    crash          where it dies, if it does
    disk_faults, model_faults   planned faults; those of the model hit the first house
    reader_faults, writer_faults, engine_faults  of the threads
    """

    models: tuple[int, ...] = (0,)
    requests: tuple[RequestPlan, ...] = ()
    close_s: float = NEVER
    drain_s: float = 30.0
    crash: CrashPoint | None = None
    disk_faults: tuple[DiskFault, ...] = ()
    model_faults: tuple[ModelFault, ...] = ()
    reader_faults: tuple[WorkerFault, ...] = ()
    writer_faults: tuple[WorkerFault, ...] = ()
    engine_faults: tuple[WorkerFault, ...] = ()


class BoundsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the houses; ``slot_planes`` is the size of a slot in planes, 0: a whole block."""

    requests_max: int = 64
    sequences_max: int = 2
    channel_messages: int = 4
    restore_slots: int = 2
    spill_slots: int = 3
    slot_planes: int = 0
    restores_max: int = 2
    disk_readers: int = 2


class WorldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole world.

    seed            of the schedule and of every choice made at run time
    backend         trio or asyncio
    layout, bounds  of its houses
    bytes_max       budget of the spill root
    capacity_bytes  size of the file system, 0: without end
    durability      process or power
    busy            share of the calls on threads that take time
    processes       in their order
    """

    seed: int
    backend: Backend
    layout: LayoutPlan
    bounds: BoundsPlan
    bytes_max: int
    capacity_bytes: int
    durability: Literal["process", "power"]
    busy: float
    processes: tuple[ProcessPlan, ...]


def draw_plan(seed: int) -> WorldPlan:
    """Draw a world; the same seed gives the same world."""
    draw = seeded_random("plan", seed)
    layout = _draw_layout(draw)
    prompts = _Prompts(draw, layout.block_tokens)
    blocks = draw.choice((3, 6, 10, 20, 60))
    bytes_max = blocks * _BLOCK_FILE_BYTES + draw.randrange(_BLOCK_FILE_BYTES)
    count = draw.choice((1, 2, 2, 3))
    return WorldPlan(
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
            words = [draw.choice(self._words) for _ in range(draw.choice((0, 1, 2, 3, 4)))]
            tail = self._ids(draw.randrange(self._block + 1))
            prompt = sum(words, ()) + tail or self._ids(1)
        prompt = prompt[: 6 * self._block]
        self._known.append(prompt)
        return prompt

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(1, VOCAB) for _ in range(count))


def _draw_process(draw: random.Random, prompts: _Prompts) -> ProcessPlan:
    models = draw.choice(((0,), (0,), (0,), (0, 1), (1,), (0, 0)))
    count = draw.choice((1, 2, 3, 4))
    requests = tuple(_draw_request(draw, prompts, len(models)) for _ in range(count))
    plan = ProcessPlan(models=models, requests=requests)
    kinds = draw.choices(
        ("none", "disk", "crash", "engine", "threads", "close"), (5, 5, 4, 2, 1, 2), k=1
    )
    return msgspec.structs.replace(plan, **_draw_trouble(draw, kinds[0]))


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
    leave, cancel_s = NEVER, float(NEVER)
    chance = draw.random()
    if chance < 0.12:
        leave = draw.randrange(3)
    elif chance < 0.28:
        cancel_s = draw.choice((0.0, 0.001, 0.01, 0.05)) * draw.random()
    return RequestPlan(
        client=draw.randrange(3),
        house=draw.randrange(houses),
        start_s=draw.choice((0.0, 0.0, 0.01, 0.05)) * draw.random(),
        prompt=prompts.prompt(),
        salt=draw.choice(("", "", "", "tenant")),
        max_tokens=draw.choice((1, 2, 2, 5)),
        stop=(chr(34 + draw.randrange(VOCAB)),) if draw.random() < 0.1 else (),
        ignore_eos=draw.random() < 0.3,
        no_store=draw.random() < 0.05,
        leave_tokens=leave,
        cancel_s=cancel_s,
    )


def _draw_disk_fault(draw: random.Random) -> DiskFault:
    operation = draw.choice(("read", "read", "write", "write", "rename", "remove", "scan", "claim"))
    kinds: tuple[str, ...] = (*ERRNOS, "slow", "stuck", "rot", "rot", "vanish")
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
