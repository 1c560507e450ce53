"""What an engine is made of, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.runtime.config import Limits
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import Runner
from millpond.runtime.threads import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of.

    runner          runs on ``thread`` and nowhere else
    thread          the pinned thread
    layout          groups and grid
    context_tokens  tokens that prompt and completion may reach
    end_ids         token ids that end a completion
    weight_pool, restore_pool, spill_pool  staging
    limits          bounds
    clock           monotonic seconds
    """

    runner: Runner
    thread: Worker
    layout: KvLayout
    context_tokens: int
    end_ids: frozenset[int]
    weight_pool: StagingPool
    restore_pool: StagingPool
    spill_pool: StagingPool
    limits: Limits
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Requests by state, steps run, tokens computed, and why the thread serves no more.

    restoring      requests that have restored rows and do not run yet
    held           live caches of ended requests that are kept
    shared_tokens  prompt tokens whose rows came from another live cache
    """

    waiting: int
    running: int
    restoring: int
    steps: int
    prefilled_tokens: int
    decoded_tokens: int
    offered: int
    refused: int
    problem: str
    held: int = 0
    shared_tokens: int = 0
