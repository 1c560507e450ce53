"""The gateway: owns the tokenizer, request ids and one output stream per request.

Invariants

(I1) Every request that was submitted ends exactly once: its stream gets one end, its entry leaves
     when the engine's Finished came.
(I2) Nothing that a slow reader does holds up the engine: a stream buffers at most the completion,
     which ``max_tokens`` bounds.
(I3) Leaving a stream cancels its request; the Cancel is queued at once and sent by the pump, behind
     the Submit, on the same arrow.
(I4) A request whose deadline passed, and every request once the engine stopped, ends for its reader
     at once, and is left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec
from anyio import (
    BrokenResourceError,
    ClosedResourceError,
    Event,
    create_task_group,
    move_on_after,
)
from millpond.actors.gateway_prompt import GatewayParts, Prompt, checked, prepare
from millpond.actors.gateway_request import Request, TokenStream, engine_error
from millpond.codecs.choices import SamplingParams
from millpond.codecs.messages import (
    Cancel,
    Finished,
    Ready,
    Stopped,
    Submit,
    ToGateway,
    Tokens,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineError,
    MillpondError,
    QueueFull,
    RuntimeClosed,
)

__all__ = ["Gateway", "GatewayParts", "GatewayStatistics", "Prompt"]


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """Requests in the house now, submitted ever, and ended by reason."""

    live: int
    submitted: int
    ended: dict[str, int]


class Gateway:
    """Text in, text out."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._thread, self._limits, self._clock = parts.thread, parts.limits, parts.clock
        # mutable state, changed only in stream, _submit, _deliver, _pump and close
        self._requests: dict[int, Request] = {}
        self._entering = 0
        self._next_id = 0
        self._cancels: deque[int] = deque()
        self._submissions: Outbox[ToStore] | None = None
        self._closing = False
        self._stopped: EngineError | None = None
        self._ended: dict[str, int] = {}
        self._changed = Event()
        self._ready = Event()
        self.load_ms = 0.0

    def __repr__(self) -> str:
        return f"<Gateway {len(self._requests)} requests, {self._next_id} ever>"

    async def run(self, tokens: Inbox[ToGateway], submissions: Outbox[ToStore]) -> None:
        """Serve until closed; whatever ends it, no stream is left waiting."""
        self._submissions = submissions
        try:
            async with tokens, create_task_group() as loops:
                loops.start_soon(self._pump, submissions)
                await self._deliver(tokens)
                self._closing = True
                self._change()
        finally:
            self._closing = True
            for request in self._requests.values():
                request.fail(EngineDied("the house ended before the request did"))
            self._requests.clear()
            self._change()

    async def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        await self._ready.wait()

    @asynccontextmanager
    async def stream(self, prompt: Prompt) -> AsyncIterator[TokenStream]:
        """Submit a prompt; leaving the block before the end cancels the request.

        Raises EmptyPrompt, ContextExceeded, InvalidParameter, KvMemoryExceeded or QueueFull before
        anything is sent, EngineStalled or EngineDied if the engine stopped, DeadlineExceeded,
        RuntimeClosed once the house closes.
        """
        async with self.stream_choices(prompt, 1) as streams:
            yield streams[0]

    @asynccontextmanager
    async def stream_choices(
        self, prompt: Prompt, choices: int
    ) -> AsyncIterator[tuple[TokenStream, ...]]:
        """Submit a prompt for several answers, whose rows are computed once; else as ``stream``."""
        requests: list[Request] = []
        started, samplings = self._clock(), checked(prompt, choices)
        try:
            wait_s = prompt.deadline_s if prompt.deadline_s is not None else math.inf
            with move_on_after(wait_s) as entering:
                await self._submit(prompt, samplings, requests)
            if entering.cancelled_caught:
                raise DeadlineExceeded(f"found no room within {prompt.deadline_s:g} s")
            for request in requests:
                request.expires_s = started + wait_s
            self._change()
            yield tuple(TokenStream(one, partial(self._leave, one)) for one in requests)
        finally:
            for request in requests:
                self._leave(request)

    def close(self) -> None:
        """Take no more requests and cancel those that run; ``run`` returns once all ended."""
        self._closing = True
        for request in self._requests.values():
            request.fail(RuntimeClosed("the runtime is closing"))
            self._leave(request)
        self._change()

    def stop(self, error: EngineError) -> None:
        """Serve no more: whatever waits fails now, and so does what comes."""
        self._stopped = error
        for request in self._requests.values():
            request.fail(error)
            self._leave(request)
        self._change()

    def fail(self, request_id: int, error: MillpondError) -> None:
        """End one request with an error, and leave it."""
        request = self._requests[request_id]
        request.fail(error)
        self._leave(request)

    @property
    def problem(self) -> str:
        """Why it serves no more, ``""`` while it does."""
        return str(self._stopped) if self._stopped is not None else ""

    def marks(self) -> dict[int, int]:
        """Return the requests that have not ended: id → tokens so far."""
        return {one.id: len(one.token_ids) for one in self._requests.values()}

    def statistics(self) -> GatewayStatistics:
        """Return the gateway's figures."""
        return GatewayStatistics(len(self._requests), self._next_id, dict(self._ended))

    def unread(self) -> tuple[int, ...]:
        """Return the ids of the requests that run for a reader: they did not end, nobody left."""
        return tuple(one.id for one in self._requests.values() if not one.cancelled)

    # -- requests in

    async def _submit(
        self, prompt: Prompt, samplings: tuple[SamplingParams, ...], requests: list[Request]
    ) -> None:
        """Send a Submit for each choice; ``requests`` gets those that were sent."""
        started, choices = self._clock(), len(samplings)
        self._check_open(choices)
        self._entering += choices
        try:
            submit = await self._thread.call(partial(prepare, self._parts, prompt, samplings[0]))
            self._check_open()
            first = self._next_id
            entered = [self._enter(submit, first, sampling, started) for sampling in samplings]
        finally:
            self._entering -= choices
            self._change()
        try:
            for request in entered:
                await self._send(request)
                requests.append(request)
        finally:
            for request in entered[len(requests) :]:
                self._requests.pop(request.id, None)  # the house may have ended meanwhile
            self._change()

    def _enter(
        self, submit: Submit, first: int, sampling: SamplingParams, started: float
    ) -> Request:
        request_id = self._next_id
        found = msgspec.structs.replace(
            submit,
            request_id=request_id,
            sampling=sampling,
            twin_of=first if request_id > first else None,
        )
        request = Request(found, self._parts.tokenizer.detokenizer(), self._clock, started)
        self._next_id += 1
        self._requests[request_id] = request
        return request

    async def _send(self, request: Request) -> None:
        assert self._submissions is not None, "a house yields its gateway once it runs"
        try:
            await self._submissions.send(request.submit)
        except (BrokenResourceError, ClosedResourceError) as error:
            raise EngineDied("the house ended before the request began") from error
        request.submitted = True

    def _check_open(self, more: int = 0) -> None:
        """Raise unless ``more`` requests can come in."""
        if self._stopped is not None:
            raise self._stopped
        if self._closing:
            raise RuntimeClosed("the runtime is closing")
        live = len(self._requests) + self._entering
        if live + more > self._limits.requests_max:
            raise QueueFull(
                f"found {live} requests in the house and {more} more, "
                f"expected at most {self._limits.requests_max}"
            )

    def _leave(self, request: Request) -> None:
        if request.submitted and not request.is_over and not request.cancelled:
            request.cancelled = True
            self._cancels.append(request.id)
            self._change()

    # -- arrows

    async def _pump(self, submissions: Outbox[ToStore]) -> None:
        """Send Cancels as they are queued; close the arrow once closing and nothing is left."""
        async with submissions:
            while True:
                while self._cancels:
                    await submissions.send(Cancel(request_id=self._cancels[0]))
                    self._cancels.popleft()
                if self._closing and not self._requests and not self._entering:
                    return
                with move_on_after(self._end_late() - self._clock()):
                    await self._changed.wait()

    def _end_late(self) -> float:
        """End the requests whose deadline passed; return when the next one's does."""
        now, following = self._clock(), math.inf
        for request in self._requests.values():
            if request.is_closed:
                continue
            if request.expires_s <= now:
                late_s = now - request.started
                request.fail(DeadlineExceeded(f"found no end within {late_s:.3g} s", request.id))
                self._leave(request)
            else:
                following = min(following, request.expires_s)
        return now if self._cancels else following

    async def _deliver(self, tokens: Inbox[ToGateway]) -> None:
        async for message in tokens:
            match message:
                case Tokens():
                    request = self._requests[message.request_id]
                    if request.take(message) and not request.cancelled:
                        self._leave(request)
                case Finished():
                    request = self._requests.pop(message.request_id)
                    self._ended[message.reason] = self._ended.get(message.reason, 0) + 1
                    request.end(message)
                    self._change()
                case Ready():
                    self.load_ms = message.load_ms
                    self._ready.set()
                case Stopped():
                    self.stop(engine_error(message.error_type, message.error))
                case _:
                    assert_never(message)

    def _change(self) -> None:
        self._changed.set()
        self._changed = Event()
