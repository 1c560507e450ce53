"""Worlds that once broke a rule, each with its story.  Written out, since drawing may change.

``scripts/simulate.py --seed N --shrink`` prints such a world as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.sim_faults import CrashPoint, DiskFault
from millpond.runtime.testing.workers import WorkerFault
from millpond.runtime.testing.world_plan import (
    BoundsPlan,
    LayoutPlan,
    ProcessPlan,
    RequestPlan,
    WorldPlan,
)

FULL = LayoutPlan(
    groups=(("full", 2, 1),), block_tokens=2, chunk_blocks=1, boundary_chunks=4, window=5
)
BOTH = LayoutPlan(
    groups=(("sliding", 2, 1), ("full", 1, 2)),
    block_tokens=4,
    chunk_blocks=1,
    boundary_chunks=2,
    window=6,
)


@dataclass(frozen=True, slots=True)
class PastWorld:
    """A world, and what broke in it, what that cost, and what now holds."""

    story: str
    plan: WorldPlan


def ask(*prompt: int, **more: object) -> RequestPlan:
    return RequestPlan(**{"client": 0, "house": 0, "start_s": 0.0, "prompt": prompt, **more})


def world(*processes: ProcessPlan, **more: object) -> WorldPlan:
    plan = WorldPlan(
        seed=1,
        backend="trio",
        layout=BOTH,
        bounds=BoundsPlan(),
        bytes_max=100_000,
        capacity_bytes=0,
        durability="process",
        busy=0.0,
        processes=processes,
    )
    return msgspec.structs.replace(plan, **more)


WORDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
_SHARED = (22, 22, 3, 12, 23, 34, 27, 10, 27, 18, 44)

PAST_WORLDS = (
    PastWorld(
        """The root's probe was written before anything was counted: every open of a root at its
        budget went 64 KiB over it.  Now the budget is kept short by the probe.""",
        world(ProcessPlan(requests=(ask(*WORDS),)), ProcessPlan(), bytes_max=4_500),
    ),
    PastWorld(
        """With the file system full, opening gave up before it read what was there: every block was
        on disk and none was found.  Now a full disk can still be read.""",
        world(
            ProcessPlan(requests=(ask(9, 30), ask(15, 4, 8))),
            layout=FULL,
            capacity_bytes=3_000,
        ),
    ),
    PastWorld(
        """A rename took effect and reported an error all the same (its folder could not be synced):
        the block stayed under its name, and nobody counted it.  Now it is removed.""",
        world(
            ProcessPlan(
                requests=(ask(*WORDS),),
                disk_faults=(DiskFault(operation="rename", nth=0, kind="late", times=3),),
            ),
        ),
    ),
    PastWorld(
        """Two houses of one model wrote one block at the same time; the eviction of the first took
        the file of the second, and the index promised a block that was gone.""",
        world(
            ProcessPlan(
                models=(0, 0),
                requests=(
                    ask(*WORDS, client=0),
                    ask(*WORDS, client=1, house=1),
                    ask(*WORDS[2:], client=2),
                ),
            ),
            bytes_max=4_278,
            busy=0.4,
        ),
    ),
    PastWorld(
        """A caller waited to submit when its house died, and got the arrow's ClosedResourceError.
        Now every caller of a house that ends gets one of millpond's own errors.""",
        world(
            ProcessPlan(
                requests=(ask(1, 41, 8, 10, 35), ask(1)),
                crash=CrashPoint(operation=17, effect="none", power=True),
            ),
            ProcessPlan(requests=(ask(1, 41, 8, 10, 35, 2),)),
            backend="asyncio",
        ),
    ),
    PastWorld(
        """A bad block went to quarantine before the blocks behind it were removed: a crash in
        between left blocks without their parent.  Now the leaves go first.""",
        world(
            ProcessPlan(
                requests=(ask(*WORDS[:8]), ask(*WORDS[:5], 41)),
                disk_faults=(DiskFault(operation="read", nth=2, kind="short", times=100),),
            ),
        ),
    ),
    PastWorld(
        """A file could not be removed for a while: the probe's, or that of a write that failed.  It
        stayed, outside of the budget.  Now it counts until it is gone.""",
        world(
            ProcessPlan(
                requests=(ask(*WORDS),),
                disk_faults=(
                    DiskFault(operation="remove", nth=0, kind="EROFS", times=100),
                    DiskFault(operation="write", nth=3, kind="EIO", times=1),
                ),
            ),
            ProcessPlan(
                requests=(ask(*WORDS),),
                disk_faults=(DiskFault(operation="remove", nth=0, kind="EIO", times=1),),
            ),
        ),
    ),
    PastWorld(
        """The only restore slot was lost to a stuck read while another restore waited for it: the
        store's error ended the house.  Now the restore that waits is a miss.""",
        world(
            ProcessPlan(requests=(ask(*WORDS),)),
            ProcessPlan(
                requests=(ask(*WORDS, client=0), ask(*WORDS, client=1), ask(*WORDS, client=2)),
                reader_faults=(WorkerFault(call=0, kind="stall"),),
            ),
            bounds=BoundsPlan(restore_slots=1, disk_readers=1, restores_max=3),
        ),
    ),
    PastWorld(
        """A planned failure while rows are restored: the request starts cold and is still right.""",
        world(
            ProcessPlan(requests=(ask(*WORDS),)),
            ProcessPlan(
                requests=(ask(*WORDS), ask(*WORDS)),
                model_faults=(ModelFault(step=0, kind="restore"),),
            ),
        ),
    ),
    PastWorld(
        """A choice whose rows all came from the first one failed while it decoded: it was taken for
        one that had computed nothing, began afresh, and its answer went on with a second first
        token.  Now it fails: only a sequence without a token may start cold.""",
        world(
            ProcessPlan(
                requests=(
                    ask(7, 17, 22, 6, 24, 15, 47, 22, 27, max_tokens=5, choices=3, priority=1),
                ),
                model_faults=(ModelFault(step=6, kind="sequence"),),
            ),
            seed=6163,
            layout=msgspec.structs.replace(BOTH, boundary_chunks=0, window=3),
            durability="power",
        ),
    ),
    PastWorld(
        """A request began to run with a fork of another's live cache in the step that still restored
        blocks for it: the restored rows were copied over the fork, and the text was wrong (a
        starting-over restore threw the fork away).  Now the fork replaces them.""",
        world(
            ProcessPlan(
                requests=(
                    ask(*_SHARED, client=1, start_s=0.0021377064428713057, max_tokens=1),
                    ask(*_SHARED, client=0, max_tokens=1, priority=-1),
                ),
            ),
            seed=4144,
            layout=LayoutPlan(
                groups=(("sliding", 2, 1), ("full", 1, 2)),
                block_tokens=5,
                chunk_blocks=1,
                boundary_chunks=1,
                window=4,
            ),
            busy=0.1,
        ),
    ),
    *(
        PastWorld(
            f"""A house died while a caller sent its second choice (schedule {seed}): the caller got a
            KeyError of the gateway's own book-keeping.  Now it gets EngineDied.""",
            world(
                ProcessPlan(
                    requests=tuple(
                        ask(*WORDS[:count], client=count, choices=3) for count in (2, 5, 9)
                    ),
                    abort_steps=steps,
                ),
                seed=seed,
                bounds=BoundsPlan(channel_messages=1),
            ),
        )
        for steps, seed in ((9, 1), (9, 5), (10, 0), (10, 4))
    ),
)
