"""``ModelPool``: several model files in one process, under a bound of models and of memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import create_task_group, current_time, fail_after, move_on_after, to_thread
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.errors import PoolBusy
from millpond.runtime.pool_houses import Houses, Measure, Opener
from millpond.runtime.pool_slots import ModelEntry, PoolSettings, PoolStatistics, Slot
from millpond.runtime.served import ModelFigures, ServedModel

__all__ = ["ModelEntry", "ModelPool", "PoolSettings", "PoolStatistics", "open_pool"]


@asynccontextmanager
async def open_pool(
    catalogue: Catalogue, settings: PoolSettings, opener: Opener, measure: Measure
) -> AsyncIterator[ModelPool]:
    """Serve the models of a catalogue until the block is left; then every house closes.

    opener   path → a context with the loaded model; raises MillpondError
    measure  path → bytes of its weights as held; runs on a thread, raises MillpondError
    """
    async with create_task_group() as group:
        houses = Houses(catalogue, settings, (opener, measure), group)
        group.start_soon(houses.load_all)
        try:
            yield ModelPool(catalogue, settings, houses)
        finally:
            with move_on_after(settings.close_s, shield=True):
                await houses.close()
            group.cancel_scope.cancel()


class ModelPool:
    """Loads models when they are asked for, least recently used out; made by ``open_pool``."""

    def __init__(self, catalogue: Catalogue, settings: PoolSettings, houses: Houses) -> None:
        self._catalogue, self._settings, self._houses = catalogue, settings, houses

    def __repr__(self) -> str:
        ready = ", ".join(self.loaded()) or "empty"
        return f"<ModelPool {ready}, {len(self._houses.waiters)} wanted>"

    async def resolve(self, name: str | None) -> str:
        """Return the name of a model that is served; None is the only one there is.

        Raises UnknownModel.
        """
        if name is not None and self._catalogue.known(name) is not None:
            return name
        return await to_thread.run_sync(self._catalogue.resolve, name)

    async def entries(self) -> tuple[ModelEntry, ...]:
        """Return every model that may be asked for, in order of names."""
        files = await to_thread.run_sync(self._catalogue.scan)
        return tuple(
            ModelEntry(
                name=file.name,
                path=file.path,
                file_bytes=file.file_bytes,
                modified_at=file.modified_at,
                state=self._state(file.name),
            )
            for file in files
        )

    @asynccontextmanager
    async def acquire(self, name: str) -> AsyncIterator[ServedModel]:
        """Use a model, loaded first if need be; while the block runs it stays.

        Raises UnknownModel; ModelUnavailable if it cannot be loaded; PoolBusy if it could not be
        within ``load_wait_s``, or too many wait; RuntimeClosed once the pool closes.
        """
        slot = await self._use(name)
        try:
            assert slot.model is not None, "a slot in use is loaded (I2)"
            yield slot.model
        finally:
            slot.users -= 1
            slot.idle_since = current_time()
            self._houses.change()

    async def preload(self, name: str) -> None:
        """Load a model; raises as ``acquire`` does."""
        async with self.acquire(name):
            pass

    async def unload(self, name: str) -> bool:
        """Let a model's requests finish, then close it; False if it is not loaded."""
        slot = self._houses.slots.get(name)
        if slot is None:
            return False
        self._houses.dismiss(slot)
        while self._houses.slots.get(name) is slot:
            await self._houses.changed.wait()
        return True

    def keep(self, name: str, keep_alive_s: float) -> None:
        """Set how long a loaded model may be idle; below 0: for ever."""
        slot = self._houses.slots.get(name)
        if slot is not None:
            slot.keep_alive_s = keep_alive_s
            self._houses.change()

    def loaded(self) -> dict[str, ServedModel]:
        """Return the models that are loaded now."""
        return self._houses.loaded()

    def totals(self) -> dict[str, ModelFigures]:
        """Return the figures of every model that was ever loaded, counts over all its houses."""
        return self._houses.totals()

    def statistics(self) -> PoolStatistics:
        """Return the pool's figures."""
        return self._houses.statistics()

    async def _use(self, name: str) -> Slot:
        """Return a loaded slot that counts the caller as its user."""
        slot = self._houses.usable(name)
        if slot is not None:
            return slot
        waiter = self._houses.want(name)
        try:
            with fail_after(self._settings.load_wait_s):
                await waiter.done.wait()
        except TimeoutError:
            self._houses.leave(waiter)
            raise PoolBusy(
                f"{name}: it could not be loaded within {self._settings.load_wait_s:g} s"
            ) from None
        except BaseException:
            self._houses.leave(waiter)
            raise
        if waiter.error is not None:
            raise waiter.error
        assert waiter.slot is not None, "a waiter gets one or the other"
        return waiter.slot

    def _state(self, name: str) -> str:
        slot = self._houses.slots.get(name)
        if slot is not None:
            return slot.state
        return "wanted" if name in self._houses.waiters else "unloaded"
