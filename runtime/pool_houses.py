"""The houses of a model pool: who waits for which, and the loader that opens and closes them.

Invariants

(I1) One task, the loader, starts houses, one at a time, in the order in which models were asked
     for; so a model that others wait for gets its turn however busy the rest is.
(I2) A house is closed only when no request uses it.  Whoever waits for a model counts as its user
     from the moment it is loaded, so it cannot be closed under them.
(I3) A house that fails, whatever the reason, fails its own model only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from anyio import Event, current_time, move_on_after, to_thread
from anyio.abc import TaskGroup
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.errors import MillpondError, ModelUnavailable, RuntimeClosed, UnknownModel
from millpond.runtime.figures import ModelFigures, retired, summed
from millpond.runtime.pool_slots import PoolSettings, PoolStatistics, Slot, Waiter, Waiters
from millpond.runtime.served import ServedModel

_log = logging.getLogger(__name__)
Opener = Callable[[str], AbstractAsyncContextManager[ServedModel]]
Measure = Callable[[str], int]


class Houses:
    """Slots and waiters; all on the event loop.

    changed  set, and replaced, whenever a slot or a waiter changes
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: PoolSettings,
        ways: tuple[Opener, Measure],
        tasks: TaskGroup,
    ) -> None:
        self._catalogue, self._settings, self._tasks = catalogue, settings, tasks
        self._open, self._measure = ways
        # mutable state, changed only on the event loop
        self.slots: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self.waiters = Waiters(settings.waiters_max)
        self.changed = Event()
        self.closing = False
        self._retired: dict[str, ModelFigures] = {}
        self._failed: dict[str, tuple[str, float]] = {}
        self._loads = self._evictions = self._failures = 0

    def usable(self, name: str) -> Slot | None:
        """Return a loaded slot, used from now on by the caller, or None; wait for it then.

        Raises RuntimeClosed, and ModelUnavailable for a while after it could not be loaded.
        """
        if self.closing:
            raise RuntimeClosed("the server is closing")
        slot = self.slots.get(name)
        if slot is not None and self._is_usable(slot):
            slot.users += 1
            self.slots.move_to_end(name)
            return slot
        message, until_s = self._failed.get(name, ("", 0.0))
        if current_time() < until_s:
            raise ModelUnavailable(message)
        return None

    def want(self, name: str) -> Waiter:
        """Wait for a model from now on; raises PoolBusy."""
        waiter = self.waiters.add(name)
        self.change()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Wait no more."""
        self.waiters.leave(waiter)
        self.change()

    def dismiss(self, slot: Slot) -> None:
        """Let a slot's requests finish, then close its house."""
        slot.leaving = True
        self.change()

    def change(self) -> None:
        """Tell whoever waits for a change."""
        self.changed.set()
        self.changed = Event()

    def loaded(self) -> dict[str, ServedModel]:
        """Return the models that are loaded now."""
        return {name: slot.model for name, slot in self.slots.items() if slot.model is not None}

    def totals(self) -> dict[str, ModelFigures]:
        """Return the figures of every model that was ever loaded, counts over all its houses."""
        found = dict(self._retired)
        for name, model in self.loaded().items():
            found[name] = summed(self._retired.get(name, ModelFigures()), model.figures())
        return found

    def statistics(self) -> PoolStatistics:
        """Return the pool's figures."""
        return PoolStatistics(
            loaded=len(self.loaded()),
            wanted=len(self.waiters),
            waiting=self.waiters.count,
            users=sum(slot.users for slot in self.slots.values()),
            memory_bytes=sum(slot.memory_bytes for slot in self.slots.values()),
            loads=self._loads,
            evictions=self._evictions,
            failures=self._failures,
        )

    async def close(self) -> None:
        """Take no more requests; wait until every house closed."""
        self.closing = True
        for name in self.waiters.names():
            self._answer(name, RuntimeClosed("the server is closing"))
        for slot in self.slots.values():
            slot.leaving = True
        self.change()
        while self.slots:
            await self.changed.wait()

    # -- loading and closing

    def _is_usable(self, slot: Slot) -> bool:
        if slot.model is None or slot.leaving:
            return False
        if slot.model.problem:
            self.dismiss(slot)  # a dead engine serves nobody; another house may
            return False
        return True

    def _answer(self, name: str, found: Slot | MillpondError) -> None:
        self.waiters.answer(name, found)
        self.change()

    async def load_all(self) -> None:
        """Load what is asked for, one model after the other (I1); runs until cancelled."""
        while True:
            name = self.waiters.first()
            if name is None:
                await self.changed.wait()
            else:
                await self._load(name)

    async def _load(self, name: str) -> None:
        path = self._catalogue.known(name)
        if path is None:
            self._answer(name, UnknownModel(f"model: {name!r:.200} is gone"))
            return
        try:
            memory_bytes = await to_thread.run_sync(self._measure, path)
        except (MillpondError, OSError) as error:
            self._fail(name, str(error))
            return
        bound = self._settings.memory_bytes_max
        if bound is not None and memory_bytes > bound:
            self._fail(name, f"{name}: it takes {memory_bytes} bytes, the bound is {bound}")
            return
        while name in self.slots or not self._fits(memory_bytes):
            self._make_room(name)
            await self.changed.wait()
            if name not in self.waiters:
                return
        slot = Slot(name, path, memory_bytes, self._settings.keep_alive_s)
        self.slots[name] = slot
        self._tasks.start_soon(self._keep, slot)
        await slot.settled.wait()

    def _fits(self, memory_bytes: int) -> bool:
        held, bound = self.statistics().memory_bytes, self._settings.memory_bytes_max
        if len(self.slots) >= self._settings.models_max:
            return False
        return bound is None or held + memory_bytes <= bound

    def _make_room(self, name: str) -> None:
        """Send the least recently used model away, unless one is on its way out already."""
        if name in self.slots or any(slot.leaving for slot in self.slots.values()):
            return
        victim = next(iter(self.slots.values()))
        self._evictions += 1
        self.dismiss(victim)

    def _dismiss(self, slot: Slot) -> None:
        slot.leaving = True
        self.change()

    async def _keep(self, slot: Slot) -> None:
        """Hold a house open until it is to leave and nobody uses it (I2)."""
        try:
            async with self._open(slot.path) as model:
                slot.model, slot.idle_since = model, current_time()
                self._loads += 1
                self._answer(slot.name, slot)
                slot.settled.set()
                await self._until_left(slot)
                slot.leaving = True
                self._retired[slot.name] = retired(self.totals()[slot.name])
        except Exception as error:  # (I3): the others serve on
            self._fail(slot.name, _told(error))
            if not isinstance(error, MillpondError):
                _log.error("%s: its house failed: %s", slot.name, _told(error), exc_info=error)
        finally:
            slot.model = None
            del self.slots[slot.name]
            slot.settled.set()
            self.change()

    async def _until_left(self, slot: Slot) -> None:
        while not self.closing or slot.users:
            if slot.leaving and not slot.users:
                return
            left_s = self._settings.load_wait_s
            if slot.keep_alive_s >= 0 and not slot.users:
                left_s = slot.idle_since + slot.keep_alive_s - current_time()
                if left_s <= 0:
                    return
            with move_on_after(left_s):
                await self.changed.wait()

    def _fail(self, name: str, message: str) -> None:
        self._failures += 1
        self._failed[name] = (message, current_time() + self._settings.retry_s)
        self._answer(name, ModelUnavailable(message))


def _told(error: Exception) -> str:
    """Return what requests are told of an error; a bug's own words stay in the log."""
    if isinstance(error, MillpondError):
        return str(error)
    return f"internal error ({type(error).__name__})"
