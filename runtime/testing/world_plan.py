"""What happens in a simulated world, as plain data: printable, shrinkable.

A world is one disk and the processes that use it, one after another or side by side.  Each opens
the spill root, serves its requests in one house or two, and ends: closed, killed, without power.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from millpond.codecs.descriptors import KvDType, LayerType
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.schedule import Backend
from millpond.runtime.testing.sim_faults import CrashPoint, DiskFault
from millpond.runtime.testing.workers import WorkerFault

VOCAB = 48  # ids; 0 ends a completion
NEVER = -1
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
    cancel_steps   cancel the caller after so many turns of another task; -1: never
    choices        answers that are asked for
    priority, deadline_s  as in the API; a deadline of -1 is none
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
    cancel_steps: int = NEVER
    choices: int = 1
    priority: int = 0
    deadline_s: float = NEVER


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    together       it runs beside the process before it, on the same root
    models         weights of its houses, by number
    requests       what is asked
    close_s        close the houses at that time, whatever runs; -1: after the last request
    drain_s        time to drain then
    abort_steps    an actor fails after so many turns, and takes its house down; -1: none does
    abort_place    the same once an actor waits at the place of this number; -1: none does
    crash          where it dies, if it does
    disk_faults, model_faults   planned faults; those of the model hit the first house
    reader_faults, writer_faults, engine_faults  of the threads
    """

    together: bool = False
    models: tuple[int, ...] = (0,)
    requests: tuple[RequestPlan, ...] = ()
    close_s: float = NEVER
    drain_s: float = 30.0
    abort_steps: int = NEVER
    abort_place: int = NEVER
    crash: CrashPoint | None = None
    disk_faults: tuple[DiskFault, ...] = ()
    model_faults: tuple[ModelFault, ...] = ()
    reader_faults: tuple[WorkerFault, ...] = ()
    writer_faults: tuple[WorkerFault, ...] = ()
    engine_faults: tuple[WorkerFault, ...] = ()

    @property
    def aborts(self) -> bool:
        """True iff an actor is planned to fail."""
        return self.abort_steps >= 0 or self.abort_place >= 0


class BoundsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the houses.

    slot_planes   size of a slot in planes, 0: a whole block
    kv_sequences  budget of the live caches in longest sequences, 0: no bound
    """

    requests_max: int = 64
    sequences_max: int = 2
    channel_messages: int = 4
    restore_slots: int = 2
    spill_slots: int = 3
    slot_planes: int = 0
    restores_max: int = 2
    disk_readers: int = 2
    held_max: int = 16
    bypass_max: int = 4
    kv_sequences: float = 0.0


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
