"""The callers of a simulated house: they ask, read, leave, and compare what they get."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from anyio import CancelScope, Event, create_task_group, move_on_after, sleep
from anyio.lowlevel import checkpoint
from millpond.actors.gateway import Gateway, Prompt
from millpond.actors.gateway_request import TokenStream
from millpond.codecs.choices import SamplingParams
from millpond.runtime.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineStalled,
    MillpondError,
    QueueFull,
    RequestFailed,
    RuntimeClosed,
)
from millpond.runtime.results import Completion
from millpond.runtime.testing.oracle import Answer
from millpond.runtime.testing.world_plan import RequestPlan

if TYPE_CHECKING:
    from millpond.runtime.testing.sim_house import SimHouse, SimProcess
    from millpond.runtime.testing.world import World

PLAIN_TOKENS = 3  # a wrong row changes the first one already


class Client:
    """Sends its requests one after another.

    is_closing  the world is closing the houses: requests may end with RuntimeClosed from here on
    """

    def __init__(
        self,
        world: World,
        process: SimProcess,
        houses: list[SimHouse],
        requests: list[RequestPlan],
        name: str,
    ) -> None:
        """Get ready; without ``requests`` it is told by ``ask``, perhaps twice the same."""
        self._world, self._process, self._houses = world, process, houses
        self._asks_again = not requests
        self._requests, self._name, self._breach = requests, name, world.judge.breach
        # mutable state, changed only in run and by the world
        self.is_closing = self._has_deadline = False
        self.ended = Event()
        self._scope: CancelScope | None = None

    def cancel(self) -> None:
        """Cancel the request under way."""
        if self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """Ask everything; the end is told by ``ended`` however it comes."""
        try:
            for request in self._requests:
                await sleep(request.start_s)
                await self.ask(self._houses[request.house], request)
        finally:
            self.ended.set()

    async def ask(self, house: SimHouse, request: RequestPlan) -> Completion | None:
        """Send one request and check what comes of it; None unless it was answered."""
        answer = self._world.oracle.answer(house.model, request)
        done: Completion | None = None
        outcome = "cancelled"
        try:
            async with _cancelled_as_planned(request) as self._scope:
                async with _ask(house.house.gateway, request) as streams:
                    for tokens in streams:
                        done = await self._read(tokens, request, answer)
                        if done is not None and tokens is not streams[-1]:
                            self._check_done(done, house, request, answer)
                outcome = "left"
        except MillpondError as error:
            outcome = type(error).__name__
            self._has_deadline = request.deadline_s >= 0
            self._check_error(error, house)
        if done is not None:
            outcome = "answered"
            self._check_done(done, house, request, answer)
        self._world.result.outcomes[outcome] += 1
        self._world.trace.event(self._name, f"{outcome} {answer.text!r}")
        return done

    async def _read(
        self, tokens: TokenStream, request: RequestPlan, answer: Answer
    ) -> Completion | None:
        seen: list[int] = []
        text = ""
        if request.leave_tokens == 0:
            return None
        async for token in tokens:
            text += token.text
            if token.index == len(seen):
                seen.append(token.token_id)
            if tuple(seen) != answer.token_ids[: len(seen)] or not answer.text.startswith(text):
                raise self._breach(f"V1: found {seen} {text!r}, expected {answer}")
            if len(seen) == request.leave_tokens:
                return None
        return await tokens.result()

    def _check_done(
        self, done: Completion, house: SimHouse, request: RequestPlan, answer: Answer
    ) -> None:
        found = Answer(done.token_ids, done.text, done.finish_reason)
        if found != answer:
            raise self._breach(f"V1: {self._name}: found {found}, expected {answer}")
        cached, shared = done.usage.cached_tokens, done.shared_tokens
        self._world.result.cached_tokens += cached
        self._world.result.shared_tokens += shared
        if shared:
            self._check_shared(done, house, request)
            return
        watch = self._world.watch
        most = self._world.oracle.boundary(house.model, request, watch.written.__contains__)
        if cached > (0 if request.no_store else most):
            raise self._breach(
                f"V10: {cached} tokens were cached, at most {most} were ever written"
            )
        limit = self._process.layout.reuse_limit(len(request.prompt))
        searched = not request.no_store and self._process.root is not None
        was_cut = self._process.disk.crashed or self._is_failing() or bool(house.runner.injected)
        if searched and cached < limit and not done.restore.misses and not was_cut:
            raise self._breach(f"V10: {cached} of {limit} tokens were cached, with no miss counted")

    def _check_shared(self, done: Completion, house: SimHouse, request: RequestPlan) -> None:
        """Rows of another live cache: of a request with that prefix and salt, on the grid."""
        cached, shared, prompt = done.usage.cached_tokens, done.shared_tokens, request.prompt
        limit = self._process.layout.reuse_limit(len(prompt))
        if shared == cached == len(prompt) and request.choices > 1:
            return
        givers = [
            one
            for one in self._process.plan.requests
            if one.house == house.number
            and one.salt == request.salt
            and not one.no_store
            and one.prompt[:shared] == prompt[:shared]
        ]
        is_alone = len(givers) < 2 and request.choices == 1 and not self._asks_again
        on_grid = shared % self._process.layout.chunk_tokens == 0
        if shared != cached or shared > limit or not on_grid or is_alone or request.no_store:
            raise self._breach(f"V10: {self._name}: {shared} shared of {cached} cached tokens")

    def _check_error(self, error: MillpondError, house: SimHouse) -> None:
        """An error is right only if the fault that explains it happened (V2)."""
        broken = self._process.engine_threads[house.number].statistics().broken
        match error:
            case RequestFailed():
                is_right = error.request_id in house.runner.failed
            case EngineStalled() | EngineDied():
                is_right = bool(broken) or self._process.disk.crashed or self._is_failing()
            case RuntimeClosed():
                is_right = self.is_closing or self._process.disk.crashed or self._is_failing()
            case QueueFull():
                is_right = self._process.limits.requests_max < len(self._houses) * 10
            case DeadlineExceeded():
                is_right = self._has_deadline
            case _:
                is_right = False
        if not is_right:
            raise self._breach(f"V2: {self._name} got {type(error).__name__}: {error}")

    def _is_failing(self) -> bool:
        """A planned bug ends its house, and with it the process."""
        bugs = sum(runner.injected["model bug"] for runner in self._process.runners)
        return bool(bugs) or self._process.plan.aborts


@asynccontextmanager
async def _cancelled_as_planned(request: RequestPlan) -> AsyncIterator[CancelScope]:
    """Cancel what stands in the block after a time, or after some turns of another task."""
    if request.cancel_steps < 0:
        with move_on_after(request.cancel_s if request.cancel_s >= 0 else math.inf) as scope:
            yield scope
        return
    failure: BaseException | None = None
    async with create_task_group() as group:
        group.start_soon(_cancel_later, group.cancel_scope, request.cancel_steps)
        try:
            yield group.cancel_scope
        except MillpondError as error:  # not as a group of one
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _cancel_later(scope: CancelScope, steps: int) -> None:
    for _ in range(steps):
        await checkpoint()
    scope.cancel()


def client_of(task: Any) -> Client | None:
    """Return the client whose request a trio task sends, None for any other task."""
    for frame, _ in task.iter_await_frames():
        if frame.f_code is Client.ask.__code__:
            found: Client = frame.f_locals["self"]
            return found
    return None


@asynccontextmanager
async def _ask(gateway: Gateway, request: RequestPlan) -> AsyncIterator[tuple[TokenStream, ...]]:
    """Submit as callers do: for one answer or for several."""
    if request.choices == 1:
        async with gateway.stream(_prompt(request)) as tokens:
            yield (tokens,)
    else:
        async with gateway.stream_choices(_prompt(request), request.choices) as streams:
            yield streams


def _prompt(request: RequestPlan) -> Prompt:
    sampling = SamplingParams(
        max_tokens=request.max_tokens, stop=request.stop, ignore_eos=request.ignore_eos
    )
    return Prompt(
        content=request.prompt,
        sampling=sampling,
        salt=request.salt,
        no_store=request.no_store,
        priority=request.priority,
        deadline_s=request.deadline_s if request.deadline_s >= 0 else None,
    )


def plain(request: RequestPlan) -> RequestPlan:
    """Return the same question from somebody who waits for the answer."""
    return msgspec.structs.replace(
        request,
        client=0,
        house=0,
        leave_tokens=-1,
        cancel_s=-1.0,
        cancel_steps=-1,
        choices=1,
        deadline_s=-1.0,
        max_tokens=min(request.max_tokens, PLAIN_TOKENS),
    )
