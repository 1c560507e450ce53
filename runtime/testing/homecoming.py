"""After a process closed in order: everything that was lent is back (V2, V4, V5)."""

from __future__ import annotations

from millpond.runtime.kv.root import SpillRoot
from millpond.runtime.testing.invariants import DiskWatch, Judge
from millpond.runtime.testing.sim_house import SimHouse, SimProcess


def check_home(
    judge: Judge, watch: DiskWatch, process: SimProcess, houses: list[SimHouse], took_s: float
) -> None:
    """Check slots, leases, pins, reservations, live caches and requests.

    watch   tells whether the process was alone with the root
    took_s  time that the houses took to close; one that used up ``drain_s`` was cut off, and what
            lay on its arrows then is gone with it
    """
    plan, root = process.plan, process.root
    is_hurt = any(worker.statistics().broken for worker in process.workers())
    was_slow = is_hurt or any(fault.kind in ("slow", "stuck") for fault in plan.disk_faults)
    is_cut = took_s >= plan.drain_s
    if is_cut and plan.drain_s >= 10 and not was_slow:
        raise judge.breach(f"V4: a house did not end by itself within {plan.drain_s} s")
    for house in houses:
        if not is_cut:
            _check_house(judge, house, process.limits.held_max, is_hurt)
        limits = process.limits
        # a request that has ended counts until the store heard of it
        caches_max = limits.sequences_max + limits.restores_max + limits.held_max + 1
        if house.runner.most_caches > caches_max:
            raise judge.breach(f"V12: {house.runner.most_caches} live caches, at most {caches_max}")
        if house.runner.most_decodes > limits.sequences_max:
            raise judge.breach(f"V12: {house.runner.most_decodes} sequences ran at once")
    if root is not None and watch.alone:
        check_root(judge, root)
        used = process.disk.device.used_bytes
        if root.used_bytes < used and not is_hurt:
            raise judge.breach(f"V5: found {used} bytes, counted {root.used_bytes}")


def check_root(judge: Judge, root: SpillRoot) -> None:
    """However a process's houses ended: no block is pinned and no byte reserved any more."""
    blocks = [block for shelf in root.index.shelves.values() for block in shelf.blocks.values()]
    if any(block.pins for block in blocks):
        raise judge.breach("V4: a block is still pinned")
    figures = root.statistics()
    if figures.reserved_bytes:
        raise judge.breach(f"V4: {figures.reserved_bytes} bytes are still reserved")


def _check_house(judge: Judge, house: SimHouse, held_max: int, is_hurt: bool) -> None:
    house.arrows.check_end()
    memory = house.store.statistics().memory
    if memory.claims or memory.held > held_max:
        raise judge.breach(f"V4: {memory}")
    for pool in house.pools:
        figures = pool.statistics()
        if figures.lent or (figures.lost and not is_hurt):
            raise judge.breach(f"V4: {pool!r}, {figures.lost} lost")
    if house.runner.left_behind:
        raise judge.breach(f"V4: live caches {house.runner.left_behind} were never freed")
    if house.house.gateway.statistics().live:
        raise judge.breach(f"V2: {house.house.gateway!r} after its end")
