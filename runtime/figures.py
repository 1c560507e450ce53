"""Figures of a loaded model and of the spill root, for health, metrics and status pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from millpond.runtime.kv.root_options import RootStatistics

if TYPE_CHECKING:
    from millpond.runtime.api import Runtime


@dataclass(frozen=True, slots=True)
class RootFigures:
    """The spill root that all models share: blocks, bytes by use and its bound, evictions ever.

    namespaces  (namespace, blocks, bytes) of each model that wrote some, in this process or before
    """

    blocks: int = 0
    block_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    quarantine_bytes: int = 0
    bytes_max: int = 0
    evicted_blocks: int = 0
    quarantined_blocks: int = 0
    problem: str = ""
    namespaces: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """One loaded model now: requests by state, counts since it was loaded, and what is wrong.

    live, waiting, running, restoring  requests in the house, before a live cache, with one, reading
    slots_lent, slots_lost             staging slots in use, and lost for good
    held                               live caches kept for the next turn
    shared_tokens                      prompt tokens whose rows came from another live cache
    refused                            blocks offered and not kept
    pins, pins_refused                 prompts pinned for a time, or not though they should be
    namespace                          name of its folder in the root
    """

    live: int = 0
    waiting: int = 0
    running: int = 0
    restoring: int = 0
    held: int = 0
    shared_tokens: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    refused: int = 0
    pins: int = 0
    pins_refused: int = 0
    restored_blocks: int = 0
    restored_bytes: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    slots_lent: int = 0
    slots_lost: int = 0
    problem: str = ""
    spill_problem: str = ""
    compute_problem: str = ""
    root: RootFigures | None = None
    namespace: str = ""


_COUNTS = (
    "shared_tokens",
    "prefilled_tokens",
    "decoded_tokens",
    "spilled_blocks",
    "spilled_bytes",
    "refused",
    "pins",
    "pins_refused",
    "restored_blocks",
    "restored_bytes",
)


def summed(earlier: ModelFigures, now: ModelFigures) -> ModelFigures:
    """Return the figures of now, with what an earlier house of the model counted."""
    counts = {name: getattr(earlier, name) + getattr(now, name) for name in _COUNTS}
    return replace(now, **counts)


def retired(last: ModelFigures) -> ModelFigures:
    """Return what stays of a house that closed: its counts, and the root as it saw it."""
    return replace(
        last, live=0, waiting=0, running=0, restoring=0, held=0, slots_lent=0, problem=""
    )


def figures_of(runtime: Runtime, namespace: str) -> ModelFigures:
    """Return the figures of a runtime; ``namespace`` names its folder in the root."""
    found, health = runtime.statistics(), runtime.health()
    store, engine, root = found.store, found.engine, found.store.root
    return ModelFigures(
        live=found.gateway.live,
        waiting=engine.waiting + store.waiting,
        running=engine.running,
        restoring=store.restoring,
        held=engine.held,
        shared_tokens=engine.shared_tokens,
        prefilled_tokens=engine.prefilled_tokens,
        decoded_tokens=engine.decoded_tokens,
        spilled_blocks=store.spilled_blocks,
        spilled_bytes=store.spilled_bytes,
        refused=store.refused + engine.refused,
        pins=store.pins,
        pins_refused=store.pins_refused,
        restored_blocks=store.restored_blocks,
        restored_bytes=store.restored_bytes,
        misses={str(reason): count for reason, count in store.misses.items()},
        slots_lent=sum(pool.lent for pool in found.pools),
        slots_lost=sum(pool.lost for pool in found.pools),
        problem=health.problem,
        spill_problem=health.spill_problem,
        compute_problem=health.compute_problem,
        root=None if root is None else _root_of(root),
        namespace=namespace,
    )


def _root_of(root: RootStatistics) -> RootFigures:
    return RootFigures(
        blocks=root.blocks,
        block_bytes=root.block_bytes,
        used_bytes=root.block_bytes
        + root.reserved_bytes
        + root.doomed_bytes
        + root.quarantine_bytes
        + root.other_bytes,
        pinned_bytes=root.pinned_bytes,
        quarantine_bytes=root.quarantine_bytes,
        bytes_max=root.bytes_max,
        evicted_blocks=root.evicted_blocks,
        quarantined_blocks=root.quarantined_blocks,
        problem=root.problem,
        namespaces=tuple((one.name, one.blocks, one.bytes) for one in root.namespaces),
    )
