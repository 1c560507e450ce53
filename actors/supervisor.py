"""The supervisor: makes the five arrows of a house, starts its actors, ends them together.

Invariants

(I1) A cancelled body does not cut the actors off: they run shielded, and a closing house drains
     along its arrows within ``drain_s``; then whatever still runs is cancelled.
(I2) An actor that fails takes the others down at once; its error, not a group of one, leaves.
(I3) No request stands still in silence: what a watch finds stuck is logged with the state of the
     house, and ended with an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    Event,
    create_task_group,
    current_time,
    move_on_after,
    sleep,
)
from anyio.abc import TaskGroup
from millpond.actors.engine import Engine
from millpond.actors.gateway import Gateway
from millpond.actors.watch import Seen, Watch
from millpond.codecs.messages import Offer, ToEngine, ToGateway, ToStore, Weights
from millpond.runtime.channels import ChannelStatistics, Inbox, Outbox, Tap, channel
from millpond.runtime.config import Limits
from millpond.runtime.errors import HouseStuck, RequestFailed
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import Thread

_log = logging.getLogger(__name__)


class StoreActor(Protocol):
    """What a house needs of its store."""

    async def run(
        self,
        submissions: Inbox[ToStore],
        offers: Inbox[Offer],
        admissions: Outbox[ToEngine],
    ) -> None:
        """Serve until the submissions and the offers end."""

    def mark(self, request_id: int) -> tuple[int, ...]:
        """Return numbers that change as a request goes on here; none while it is not here."""


class LoaderActor(Protocol):
    """What a house needs of its loader."""

    async def run(self, weights: Outbox[Weights]) -> None:
        """Send every tensor, then Loaded, and close the arrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseParts:
    """The actors of one house and its bounds.

    tap      sees every encoded message
    threads  all that the house calls; with them it is watched (I3)
    pools    told of when something is stuck
    """

    gateway: Gateway
    store: StoreActor
    engine: Engine
    loader: LoaderActor
    limits: Limits
    tap: Tap | None = None
    threads: tuple[Thread, ...] = ()
    pools: tuple[StagingPool, ...] = ()


@dataclass(frozen=True, slots=True)
class House:
    """A running house: the gateway takes requests; ``arrows`` gives the channels' figures."""

    gateway: Gateway
    arrows: Callable[[], tuple[ChannelStatistics, ...]]


class _Arrows:
    """The five arrows."""

    def __init__(self, limits: Limits, tap: Tap | None) -> None:
        size = limits.channel_messages
        self.submissions = channel("submissions", ToStore, size, tap)
        self.admissions = channel("admissions", ToEngine, size, tap)
        self.offers = channel("offers", Offer, size, tap)
        self.tokens = channel("tokens", ToGateway, size, tap)
        self.weights = channel("weights", Weights, limits.weight_slots, tap)

    def statistics(self) -> tuple[ChannelStatistics, ...]:
        ends = (self.submissions, self.admissions, self.offers, self.tokens, self.weights)
        return tuple(outbox.statistics() for outbox, _ in ends)


class _Actors:
    """The tasks of a house, each in a shielded scope that only the house cancels (I1)."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        # mutable state, changed only here
        self._scopes: list[CancelScope] = []
        self._running = 0
        self.ended = Event()

    def start(self, run: Callable[[], Awaitable[None]]) -> None:
        self._running += 1
        self._group.start_soon(self._run, run)

    def cancel(self) -> None:
        for scope in self._scopes:
            scope.cancel()

    async def _run(self, run: Callable[[], Awaitable[None]]) -> None:
        with CancelScope(shield=True) as scope:
            self._scopes.append(scope)
            try:
                await run()
            except BaseException:
                self.cancel()
                raise
            finally:
                self._running -= 1
                if not self._running:
                    self.ended.set()


@asynccontextmanager
async def open_house(parts: HouseParts) -> AsyncIterator[House]:
    """Start a house, wait until its model is loaded, and close it on leaving.

    Raises ModelError if the model cannot be loaded, and whatever error ended an actor.
    """
    arrows = _Arrows(parts.limits, parts.tap)
    body_error: BaseException | None = None
    watching = CancelScope()
    try:
        async with create_task_group() as group:
            actors = _Actors(group)
            _start(actors, parts, arrows)
            try:
                await parts.gateway.wait_ready()
                if parts.threads and parts.limits.stuck_s:
                    group.start_soon(_watch, parts, arrows, watching)
                yield House(parts.gateway, arrows.statistics)
            except BaseException as error:
                body_error = error
                raise
            finally:
                watching.cancel()
                parts.gateway.close()
                with move_on_after(parts.limits.drain_s, shield=True):
                    await actors.ended.wait()
                actors.cancel()
    except BaseExceptionGroup as raised:
        raise _cause(raised, body_error) from None


def _start(actors: _Actors, parts: HouseParts, arrows: _Arrows) -> None:
    async def gateway() -> None:
        await parts.gateway.run(arrows.tokens[1], arrows.submissions[0])

    async def store() -> None:
        await parts.store.run(arrows.submissions[1], arrows.offers[1], arrows.admissions[0])

    async def engine() -> None:
        await parts.engine.run(
            arrows.weights[1], arrows.admissions[1], arrows.offers[0], arrows.tokens[0]
        )

    async def loader() -> None:
        await parts.loader.run(arrows.weights[0])

    for run in (gateway, store, engine, loader):
        actors.start(run)


async def _watch(parts: HouseParts, arrows: _Arrows, watching: CancelScope) -> None:
    """Look at a house now and then, and end what is stuck (I3)."""
    watch = Watch(parts.limits.stuck_s)
    with watching:
        while True:
            await sleep(watch.every_s)
            stuck = watch.look(current_time(), _seen(parts, arrows))
            for request_id in stuck.requests:
                _log.error("request %d is stuck: %s", request_id, _state(parts, arrows))
                told = f"found no progress for {parts.limits.stuck_s:g} s and more"
                parts.gateway.fail(request_id, RequestFailed(told, request_id))
            if stuck.house:
                _log.error("the house is stuck: %s", _state(parts, arrows))
                told = f"nothing happened for {parts.limits.stuck_s:g} s; the log has its state"
                parts.gateway.stop(HouseStuck(told))
                return


def _seen(parts: HouseParts, arrows: _Arrows) -> Seen:
    threads = [one.statistics() for one in parts.threads]
    sent = sum(one.sent for one in arrows.statistics())
    marks = parts.gateway.marks()
    return Seen(
        moves=sent + sum(one.finished for one in threads),
        is_busy=any(one.waiting for one in threads),
        next_id=parts.gateway.statistics().submitted,
        requests={
            one: (tokens, *parts.store.mark(one), *parts.engine.mark(one))
            for one, tokens in marks.items()
        },
    )


def _state(parts: HouseParts, arrows: _Arrows) -> str:
    """Return the state of a house for its log: figures and places, no text of anybody's."""
    arrows_in = ", ".join(f"{one.name} {one.waiting}" for one in arrows.statistics())
    requests = dict(_seen(parts, arrows).requests)
    return (
        f"{parts.gateway!r}, {parts.store!r}, {parts.engine!r}; waiting in arrows: {arrows_in}; "
        f"{', '.join(map(repr, (*parts.pools, *parts.threads)))}; requests {requests}"
    )


def _cause(raised: BaseExceptionGroup, body_error: BaseException | None) -> BaseException:
    """Return what to raise for a group: an actor's own error before what it did to the others."""
    errors = _leaves(raised, body_error)
    of_actors = [error for error in errors if error is not body_error]
    roots = [error for error in of_actors if not isinstance(error, _ECHOES)]
    chosen = roots or of_actors or errors
    return chosen[0] if len(chosen) == 1 else BaseExceptionGroup("the house failed", chosen)


# What an actor meets when its neighbour is gone already.
_ECHOES = (BrokenResourceError, ClosedResourceError)


def _leaves(group: BaseExceptionGroup, whole: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup) and error is not whole:
            found.extend(_leaves(error, whole))
        else:
            found.append(error)
    return found
