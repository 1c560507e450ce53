"""Run an async function on a seeded schedule in virtual time, on trio or asyncio.

trio     the order of runnable tasks is drawn from the seed, time jumps to the next deadline
asyncio  tasks run in the loop's own order, always the same one; time jumps likewise

The house waits for nothing outside the process, so when no task can run, time jumps.  A run that
takes more than ``turns_max`` turns of the scheduler is one that spins: ``Spinning`` is thrown into
a task.

trio offers no public way to seed its scheduler.  Its own hook for Hypothesis is used: a flag and a
random generator in ``trio._core._run``, present and alike from trio 0.22 to 0.35.  Nor does it say
where a cancellation arrives: ``Task._attempt_abort`` of the same module is watched.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import anyio
import outcome
import trio
import trio.abc
import trio.testing
from trio._core import _run as trio_run

T = TypeVar("T")
Backend = Literal["trio", "asyncio"]
Probe = Callable[[Any], None]
TURNS_MAX = 500_000


@dataclass(frozen=True, slots=True)
class Probes:
    """Called with trio's task; trio only.

    cancelled  as a cancellation is delivered to a task that waits
    after      after each step of a task; without one, steps cost less
    """

    cancelled: Probe | None = None
    after: Probe | None = None


_NO_PROBES = Probes()


class Spinning(BaseException):
    """Tasks kept each other running without end."""


def run_seeded(
    main: Callable[[], Awaitable[T]],
    seed: int,
    backend: Backend = "trio",
    probes: Probes = _NO_PROBES,
    turns_max: int = TURNS_MAX,
) -> T:
    """Run ``main`` and return what it returns."""
    if backend == "asyncio":
        return _run_asyncio(main, turns_max)
    instruments: list[trio.abc.Instrument] = [_Turns(turns_max)]
    if probes.after is not None:
        instruments.append(_Steps(probes.after))
    with _seeded(seed), _watched(probes.cancelled):
        clock = trio.testing.MockClock(autojump_threshold=0)
        return trio.run(main, clock=clock, instruments=instruments)


def virtual_backends() -> list[tuple[str, dict[str, Any]]]:
    """Return a trio and an asyncio backend whose time is virtual, for ``anyio_backend`` fixtures.

    When no task can run, time jumps to the next deadline, so nothing takes longer than it computes.
    Nothing in such a loop may wait for a thread, a file or a socket.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    return [
        ("trio", {"clock": clock}),
        ("asyncio", {"loop_factory": lambda: _VirtualLoop(TURNS_MAX)}),
    ]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    generator, state = trio_run._r, trio_run._r.getstate()
    allowed = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    generator.seed(seed)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed  # type: ignore[misc]
        generator.setstate(state)


@contextmanager
def _watched(probe: Probe | None) -> Iterator[None]:
    """Show the probe each task to which a cancellation is delivered, while it still waits."""
    if probe is None:
        yield
        return
    deliver, see = trio_run.Task._attempt_abort, probe

    def deliver_seen(task: Any, raise_cancel: Any) -> None:
        see(task)
        deliver(task, raise_cancel)

    trio_run.Task._attempt_abort = deliver_seen  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        trio_run.Task._attempt_abort = deliver  # type: ignore[method-assign]


class _Steps(trio.abc.Instrument):
    """Shows each task step to a probe."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._probe(task)


class _Turns(trio.abc.Instrument):
    """Counts turns of the scheduler; once there were too many, each throws into a task."""

    def __init__(self, turns_max: int) -> None:
        self._left = turns_max

    def before_io_wait(self, timeout: float) -> None:
        self._left -= 1
        if self._left >= 0:
            return
        for task in trio_run.GLOBAL_RUN_CONTEXT.runner.runq:
            if isinstance(task._next_send, outcome.Value) and _is_users(task):
                task._next_send = outcome.Error(Spinning())
                return


def _is_users(task: trio.lowlevel.Task) -> bool:
    """True for the main task and those below it, False for trio's own."""
    main = trio_run.GLOBAL_RUN_CONTEXT.runner.main_task
    above: trio.lowlevel.Task | None = task
    while above is not None and above is not main:
        above = above.parent_nursery.parent_task if above.parent_nursery is not None else None
    return above is not None


# -- asyncio


class _JumpingSelector(selectors.BaseSelector):
    """Watches nothing; waiting is moving the clock."""

    def __init__(self, loop: _VirtualLoop) -> None:
        self._loop = loop

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Spinning("every task waits and no deadline is set")
        self._loop.now_s += timeout
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}


class _Task(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its address."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without time and files; waking it from another thread is not supported."""

    def __init__(self, turns_max: int) -> None:
        self.now_s = 0.0
        self._turns_left = turns_max
        super().__init__(_JumpingSelector(self))
        self._clock_resolution = 1e-9
        _Task._numbers = itertools.count()
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        self._turns_left -= 1
        if self._turns_left < 0:
            self._turns_left = 10_000  # for the tasks to end
            raise Spinning
        super()._run_once()  # type: ignore[misc]


def _make_task(loop: Any, coroutine: Any, **options: Any) -> Any:
    return _Task(coroutine, loop=loop, **options)


def _run_asyncio(main: Callable[[], Awaitable[T]], turns_max: int) -> T:
    options = {"loop_factory": lambda: _VirtualLoop(turns_max)}
    return anyio.run(main, backend="asyncio", backend_options=options)


def seeded_random(*parts: object) -> random.Random:
    """Return a generator for one purpose: the same parts, the same numbers, in every process."""
    return random.Random("/".join(map(str, parts)))
