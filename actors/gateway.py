"""The gateway: owns the tokenizer, request ids and one output stream per request.

Invariants

(I1) Every request that was submitted ends exactly once: its stream gets one end, its entry leaves
     when the engine's Finished came.
(I2) Nothing that a slow reader does holds up the engine: a stream buffers at most the completion,
     which ``max_tokens`` bounds.
(I3) Leaving a stream cancels its request; the Cancel is queued at once and sent by the pump, behind
     the Submit, on the same arrow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Ordered
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec
from anyio import BrokenResourceError, ClosedResourceError, Event, create_task_group
from millpond.actors.gateway_request import GatewayTokenizer, Request, TokenStream
from millpond.codecs.choices import SamplingParams
from millpond.codecs.fingerprint import ReuseTag, chain_root
from millpond.codecs.messages import (
    Cancel,
    Finished,
    Ready,
    Submit,
    ToGateway,
    Tokens,
    ToStore,
)
from millpond.runtime.channels import Inbox, Outbox
from millpond.runtime.config import Limits
from millpond.runtime.errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineDied,
    InvalidParameter,
    QueueFull,
    RuntimeClosed,
)
from millpond.runtime.kv.blocks import block_chain, pack_tokens
from millpond.runtime.threads import Worker


def _no_schema(schema: str) -> None:
    raise InvalidParameter("json_schema: this model cannot be held to one")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """What a gateway is made of.

    tokenizer       of this model
    thread          where prompts are tokenised and hashed
    fingerprint, guard, reuse  what chain roots are made of
    block_tokens    tokens of one KV block
    context_tokens  tokens that prompt and completion may reach
    limits          bounds
    clock           monotonic seconds
    check_schema    raises InvalidParameter for a JSON schema that answers cannot be held to; runs
                    on ``thread``
    """

    tokenizer: GatewayTokenizer
    thread: Worker
    fingerprint: bytes
    guard: bytes
    reuse: ReuseTag
    block_tokens: int
    context_tokens: int
    limits: Limits
    clock: Callable[[], float]
    check_schema: Callable[[str], None] = _no_schema


_DEFAULT_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a caller asks with.

    content   text, or token ids taken verbatim
    sampling  how to choose tokens
    salt      keeps this caller's cache apart; empty: shared
    no_store  neither read nor write the spill root
    """

    content: str | Ordered[int]
    sampling: SamplingParams = _DEFAULT_SAMPLING
    salt: str = ""
    no_store: bool = False


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

        Raises EmptyPrompt, ContextExceeded, InvalidParameter or QueueFull before anything is sent,
        RuntimeClosed once the house closes.
        """
        request = await self._submit(prompt)
        try:
            yield TokenStream(request)
        finally:
            self._leave(request)

    def close(self) -> None:
        """Take no more requests and cancel those that run; ``run`` returns once all ended."""
        self._closing = True
        for request in self._requests.values():
            request.fail(RuntimeClosed("the runtime is closing"))
            self._leave(request)
        self._change()

    def statistics(self) -> GatewayStatistics:
        """Return the gateway's figures."""
        return GatewayStatistics(len(self._requests), self._next_id, dict(self._ended))

    # -- requests in

    async def _submit(self, prompt: Prompt) -> Request:
        started = self._clock()
        self._check_open()
        sampling = _checked(prompt.sampling)
        self._entering += 1
        try:
            prepared = await self._thread.call(partial(self._prepare, prompt, sampling))
            self._check_open(entered=1)
            submit = msgspec.structs.replace(prepared, request_id=self._next_id)
            request = Request(submit, self._parts.tokenizer.detokenizer(), self._clock, started)
            self._next_id += 1
            self._requests[submit.request_id] = request
        finally:
            self._entering -= 1
            self._change()
        assert self._submissions is not None, "a house yields its gateway once it runs"
        try:
            await self._submissions.send(submit)
        except BaseException as error:  # nothing was sent (I1 of runtime.channels)
            self._requests.pop(submit.request_id, None)
            self._change()
            if isinstance(error, BrokenResourceError | ClosedResourceError):
                raise EngineDied("the house ended before the request began") from error
            raise
        request.submitted = True
        return request

    def _check_open(self, entered: int = 0) -> None:
        if self._closing:
            raise RuntimeClosed("the runtime is closing")
        live = len(self._requests) + self._entering - entered
        if live >= self._limits.requests_max:
            raise QueueFull(f"found {live} requests in the house, expected fewer than that")

    def _prepare(self, prompt: Prompt, sampling: SamplingParams) -> Submit:
        """On the worker thread: tokenise, check, hash."""
        parts = self._parts
        if sampling.json_schema:
            parts.check_schema(sampling.json_schema)
        ids = self._token_ids(prompt.content)
        if len(ids) >= parts.context_tokens:
            raise ContextExceeded(
                f"prompt: found {len(ids)} tokens, expected at most {parts.context_tokens - 1} "
                f"in a context of {parts.context_tokens}"
            )
        packed = pack_tokens(ids)
        root = chain_root(parts.fingerprint, parts.guard, parts.reuse, prompt.salt)
        return Submit(
            request_id=0,
            token_ids=packed,
            root=root,
            chain=block_chain(parts.fingerprint, root, packed, parts.block_tokens),
            sampling=sampling,
            no_store=prompt.no_store,
        )

    def _token_ids(self, content: str | Ordered[int]) -> Ordered[int]:
        if isinstance(content, str):
            if not content:
                raise EmptyPrompt("prompt: found no text, expected at least one character")
            ids: Ordered[int] = self._parts.tokenizer.encode_prompt(content)
        else:
            ids = content
        if not len(ids):
            raise EmptyPrompt("prompt: found no token, expected at least one")
        size = self._parts.tokenizer.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise InvalidParameter(
                    f"token ids: found {token_id!r}, expected an integer from 0 to {size - 1}"
                )
        return ids

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
                await self._changed.wait()

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
                case _:
                    assert_never(message)

    def _change(self) -> None:
        self._changed.set()
        self._changed = Event()


def _checked(sampling: SamplingParams) -> SamplingParams:
    try:
        return msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidParameter(f"sampling: {error}") from error
