"""What a model pool is made of: its bounds, its figures, and one slot per model that it holds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
from anyio import Event
from millpond.runtime.errors import MillpondError, PoolBusy
from millpond.runtime.served import ServedModel


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a pool.

    models_max        models that are loaded at once
    memory_bytes_max  bytes of weights, as held, that they may have together; None: no bound
    keep_alive_s      time after which an idle model is closed; below 0: never
    load_wait_s       time that a request waits for its model; a large one takes minutes to read
    waiters_max       requests that wait for models; each holds a connection and a body
    retry_s           time for which a model that could not be loaded is not tried again
    close_s           time that closing houses get, their own drains included
    """

    models_max: int = 4
    memory_bytes_max: int | None = None
    keep_alive_s: float = -1.0
    load_wait_s: float = 600.0
    waiters_max: int = 256
    retry_s: float = 5.0
    close_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that may be asked for.

    state  ``unloaded``, ``wanted``, ``loading``, ``ready`` or ``leaving``
    """

    name: str
    path: str
    file_bytes: int
    modified_at: int
    state: str


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Models loaded, models and requests that wait, requests that use one; counts since start."""

    loaded: int
    wanted: int
    waiting: int
    users: int
    memory_bytes: int
    loads: int
    evictions: int
    failures: int


@dataclass(slots=True, eq=False)
class Slot:
    """One model from the beginning of its load to the end of its house.

    users       requests that use it now
    leaving     takes no more requests, and closes after those that use it
    idle_since  clock of the event loop when it was last used
    settled     set once it is loaded, or failed to
    """

    name: str
    path: str
    memory_bytes: int
    keep_alive_s: float
    model: ServedModel | None = None
    users: int = 0
    leaving: bool = False
    idle_since: float = 0.0
    settled: Event = field(default_factory=Event)

    @property
    def state(self) -> str:
        """Its state, as ModelEntry has it."""
        if self.leaving:
            return "leaving"
        return "ready" if self.model is not None else "loading"


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for a model; gets a slot that counts it as a user, or an error."""

    name: str
    slot: Slot | None = None
    error: MillpondError | None = None
    done: Event = field(default_factory=Event)


class Waiters:
    """Requests that wait for models, by model, the longest wanted model first."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # mutable state, changed only here
        self._by_name: OrderedDict[str, list[Waiter]] = OrderedDict()

    def __len__(self) -> int:
        """Return the count of models that are wanted."""
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def count(self) -> int:
        """Count of requests that wait."""
        return sum(map(len, self._by_name.values()))

    def first(self) -> str | None:
        """Return the model that was wanted first, None if none is."""
        return next(iter(self._by_name), None)

    def names(self) -> tuple[str, ...]:
        """Return the models that are wanted."""
        return tuple(self._by_name)

    def add(self, name: str) -> Waiter:
        """Add a request; raises PoolBusy."""
        if self.count >= self._count_max:
            raise PoolBusy(f"{name}: {self._count_max} requests wait for models already")
        waiter = Waiter(name)
        self._by_name.setdefault(name, []).append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Take a request out that waits no more; what it got meanwhile is given back."""
        if waiter.slot is not None:
            waiter.slot.users -= 1
        waiting = self._by_name.get(waiter.name, [])
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._by_name[waiter.name]

    def answer(self, name: str, found: Slot | MillpondError) -> None:
        """Give every request for a model what it waits for."""
        for waiter in self._by_name.pop(name, []):
            if isinstance(found, Slot):
                waiter.slot = found
                found.users += 1
            else:
                waiter.error = found
            waiter.done.set()
