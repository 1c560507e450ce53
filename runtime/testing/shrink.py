"""Make a failing world smaller while it still fails.

Each pass tries to leave something out (processes, requests, faults, crashes, tokens) or to set a
value back to its default; what still fails is kept.  Ends when a whole pass changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from millpond.runtime.testing.world_plan import BoundsPlan, ProcessPlan, RequestPlan, WorldPlan

Fails = Callable[[WorldPlan], bool]
_LISTS = ("disk_faults", "model_faults", "reader_faults", "writer_faults", "engine_faults")


def shrink(plan: WorldPlan, fails: Fails, tries_max: int = 400) -> WorldPlan:
    """Return a plan that still fails, as small as was found.

    fails      runs a world; True if it breaks the invariant in question
    tries_max  worlds run at most
    """
    left = tries_max
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(plan):
            if not left:
                return plan
            left -= 1
            if fails(candidate):
                plan, changed = candidate, True
                break
    return plan


def _smaller(plan: WorldPlan) -> Iterator[WorldPlan]:
    """Iterate over simpler plans, the greatest steps first."""
    processes = plan.processes
    for index in range(len(processes)):
        if len(processes) > 1:
            yield _with(plan, processes=_without(processes, index))
    for index, process in enumerate(processes):
        for smaller in _smaller_process(process):
            changed = (*processes[:index], smaller, *processes[index + 1 :])
            yield _with(plan, processes=changed)
    if plan.busy:
        yield _with(plan, busy=0.0)
    if plan.capacity_bytes:
        yield _with(plan, capacity_bytes=0)
    if plan.bounds != BoundsPlan():
        yield _with(plan, bounds=BoundsPlan())
    for count in (20_000, 100_000):
        if plan.bytes_max < count:
            yield _with(plan, bytes_max=count)
    if plan.backend != "trio":
        yield _with(plan, backend="trio")


def _smaller_process(process: ProcessPlan) -> Iterator[ProcessPlan]:
    for index in range(len(process.requests)):
        yield _with(process, requests=_without(process.requests, index))
    for name in _LISTS:
        faults = getattr(process, name)
        for index in range(len(faults)):
            yield _with(process, **{name: _without(faults, index)})
    if process.crash is not None:
        yield _with(process, crash=None)
    if process.together:
        yield _with(process, together=False)
    if process.abort_steps >= 0:
        yield _with(process, abort_steps=-1)
    if process.abort_place >= 0:
        yield _with(process, abort_place=-1)
    if process.close_s >= 0:
        yield _with(process, close_s=-1.0, drain_s=30.0)
    if len(process.models) > 1:
        requests = tuple(_with(one, house=0) for one in process.requests)
        yield _with(process, models=process.models[:1], requests=requests)
    for index, request in enumerate(process.requests):
        for smaller in _smaller_request(request):
            changed = (*process.requests[:index], smaller, *process.requests[index + 1 :])
            yield _with(process, requests=changed)


def _smaller_request(request: RequestPlan) -> Iterator[RequestPlan]:
    plain = RequestPlan(client=0, house=request.house, start_s=0.0, prompt=request.prompt)
    for name in ("stop", "ignore_eos", "no_store", "salt", "leave_tokens", "client"):
        if getattr(request, name) != getattr(plain, name):
            yield _with(request, **{name: getattr(plain, name)})
    for name in ("cancel_s", "cancel_steps"):
        if getattr(request, name) != getattr(plain, name):
            yield _with(request, **{name: getattr(plain, name)})
    if request.max_tokens > 1:
        yield _with(request, max_tokens=1)
    if request.start_s:
        yield _with(request, start_s=0.0)
    if len(request.prompt) > 1:
        yield _with(request, prompt=request.prompt[: len(request.prompt) // 2])
        yield _with(request, prompt=request.prompt[:-1])


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return (*items[:index], *items[index + 1 :])


def _with(plan: Any, **changes: object) -> Any:
    return msgspec.structs.replace(plan, **changes)
