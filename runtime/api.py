"""``open_runtime``: load a model and serve it, embedded in the caller's event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Ordered
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

import msgspec
from millpond.actors.engine import EngineStatistics
from millpond.actors.gateway import GatewayStatistics, Prompt
from millpond.actors.gateway_request import TokenStream
from millpond.actors.store import StoreStatistics
from millpond.actors.supervisor import House, open_house
from millpond.codecs.choices import SamplingParams
from millpond.runtime.assembly import Built, Threads, build
from millpond.runtime.channels import ChannelStatistics
from millpond.runtime.chat import ChatOptions
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.numerics import compute_problem
from millpond.runtime.results import Completion
from millpond.runtime.shared import THREAD_CLOSE_S, Shared, open_shared
from millpond.runtime.staging import StagingStatistics
from millpond.runtime.threads import PinnedThread, ThreadStatistics

__all__ = [
    "Health",
    "RequestOptions",
    "Runtime",
    "RuntimeStatistics",
    "Shared",
    "SpillReport",
    "open_runtime",
    "open_shared",
]


class SpillReport(msgspec.Struct, frozen=True, kw_only=True):
    """What this runtime wrote, by now.

    blocks, bytes  files published and their whole sizes
    refused        blocks that were offered and not kept, or not offered for want of room
    problem        why nothing is spilled; empty while spilling works
    pin_problem    why the last prompt that asked for it was not pinned; empty if it was
    """

    blocks: int = 0
    bytes: int = 0
    refused: int = 0
    problem: str = ""
    pin_problem: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """Everything with a queue."""

    gateway: GatewayStatistics
    engine: EngineStatistics
    store: StoreStatistics
    arrows: tuple[ChannelStatistics, ...]
    pools: tuple[StagingStatistics, ...]
    threads: tuple[ThreadStatistics, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests can be served, and whether their cache can.

    problem          empty while the engine serves
    spill_problem    empty while blocks are spilled
    compute_problem  why it is slower than it could be; empty if it is not
    """

    problem: str
    spill_problem: str
    compute_problem: str = ""

    @property
    def is_serving(self) -> bool:
        """True while requests are answered."""
        return not self.problem


class RequestOptions(TypedDict, total=False):
    """How a request is served, beside what it asks.

    salt        keeps the cache of this caller apart; empty: shared
    no_store    neither read nor write the spill root, nor share rows with other requests
    priority    -100 to 100, 0 by default; the higher goes first, none waits for ever
    deadline_s  seconds from the call on in which it must end, else DeadlineExceeded
    pin         seconds for which no block of the prompt is evicted, from the request's end on; 0
                ends that.  ``spill_report`` says if it was refused
    """

    salt: str
    no_store: bool
    priority: int
    deadline_s: float | None
    pin: float | None


class Runtime:
    """One loaded model; made by ``open_runtime``, used on its event loop only."""

    def __init__(self, built: Built, house: House, load_ms: float) -> None:
        self._built, self._house, self._chats = built, house, built.chats
        self.identity, self.tokenizer = built.identity, built.tokenizer
        self.load_ms = load_ms  # from opening the runtime to the model being loaded

    def __repr__(self) -> str:
        return f"<Runtime {self.identity.name}, {self._house.gateway!r}, {self._built.store!r}>"

    @property
    def device(self) -> str:
        """Kind of the device: ``cpu`` or ``gpu``."""
        return self.identity.numerics.device_kind

    @property
    def chat_template(self) -> str:
        """Jinja text of the chat template in use, ``""`` for none."""
        return self._chats.source

    @property
    def problem(self) -> str:
        """Why no request is served, ``""`` while they are."""
        return self._built.engine.statistics().problem or self._built.gateway.problem

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Ordered[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[TokenStream]:
        """Submit a prompt; the block reads its tokens, leaving it early cancels the request.

        prompt    text (BOS added as the model wants it), or token ids taken verbatim
        options   see ``RequestOptions``

        Raises EmptyPrompt, ContextExceeded, InvalidParameter, KvMemoryExceeded, QueueFull,
        DeadlineExceeded, RuntimeClosed, EngineStalled, EngineDied; while reading RequestFailed too.
        """
        async with self.stream_choices(prompt, 1, sampling, **options) as streams:
            yield streams[0]

    @asynccontextmanager
    async def stream_choices(
        self,
        prompt: str | Ordered[int],
        n: int,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[tuple[TokenStream, ...]]:
        """Submit a prompt for ``n`` answers, whose rows are computed once.

        With a seed each choice has random keys of its own.  The rest as in ``stream``; every choice
        counts as a request.
        """
        request = Prompt(content=prompt, sampling=sampling or SamplingParams(), **options)
        async with self._house.gateway.stream_choices(request, n) as streams:
            yield streams

    async def generate_choices(
        self,
        prompt: str | Ordered[int],
        n: int,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Completion, ...]:
        """Run ``n`` answers to their ends; arguments and errors as in ``stream_choices``."""
        async with self.stream_choices(prompt, n, sampling, **options) as streams:
            return tuple([await tokens.result() for tokens in streams])

    async def generate(
        self,
        prompt: str | Ordered[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Run a prompt to its end; arguments and errors as in ``stream``."""
        async with self.stream(prompt, sampling, **options) as tokens:
            return await tokens.result()

    async def encode_chat(
        self, messages: Ordered[Mapping[str, object]], options: ChatOptions | None = None
    ) -> list[int]:
        """Return a chat's token ids, BOS included: what ``stream_chat`` submits.

        Raises InvalidParameter for messages that are none, ChatTemplateError if there is no
        template or it fails, RuntimeClosed.
        """
        return await self._built.threads.host.call(partial(self._chats.encode, messages, options))

    @asynccontextmanager
    async def stream_chat(
        self,
        messages: Ordered[Mapping[str, object]],
        sampling: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        **request: Unpack[RequestOptions],
    ) -> AsyncIterator[TokenStream]:
        """Submit a chat, rendered by its template, for the model's next turn.

        messages  ``{"role": ..., "content": ...}``; what looks like a control token is text there
        options   tools and further variables of the template
        request   as the options of ``stream``

        The rest as in ``stream``; raises what ``encode_chat`` and ``stream`` raise.
        """
        ids = await self.encode_chat(messages, options)
        async with self.stream(ids, sampling, **request) as tokens:
            yield tokens

    async def chat(
        self,
        messages: Ordered[Mapping[str, object]],
        sampling: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        **request: Unpack[RequestOptions],
    ) -> Completion:
        """Return the model's next turn of a chat; arguments and errors as in ``stream_chat``."""
        async with self.stream_chat(messages, sampling, options=options, **request) as tokens:
            return await tokens.result()

    async def drain(self) -> None:
        """Wait until the blocks offered so far are written, for ``limits.drain_s`` at most."""
        await self._built.store.drain(self._built.config.limits.drain_s)

    def spill_report(self) -> SpillReport:
        """Return what was written, and why nothing is if so."""
        figures = self._built.store.statistics()
        return SpillReport(
            blocks=figures.spilled_blocks,
            bytes=figures.spilled_bytes,
            refused=figures.refused + self._built.engine.statistics().refused,
            problem=self._built.shared.spill_problem or figures.problem,
            pin_problem=figures.pin_problem,
        )

    def health(self) -> Health:
        """Return what works."""
        built = self._built
        return Health(
            self.problem,
            self.spill_report().problem,
            compute_problem(built.identity.numerics, built.config),
        )

    def statistics(self) -> RuntimeStatistics:
        """Return the figures of everything with a queue."""
        built = self._built
        return RuntimeStatistics(
            gateway=self._house.gateway.statistics(),
            engine=built.engine.statistics(),
            store=built.store.statistics(),
            arrows=self._house.arrows(),
            pools=tuple(pool.statistics() for pool in built.pools),
            threads=tuple(thread.statistics() for thread in built.threads.all()),
        )


@asynccontextmanager
async def open_runtime(
    config: RuntimeConfig, shared: Shared | None = None
) -> AsyncIterator[Runtime]:
    """Load a model and serve it until the block is left, on asyncio or trio.

    shared  disk threads and spill root of this process; None opens them for this runtime alone

    Raises ConfigError, ModelNotFound, ModelUnreadable, UnsupportedModel, TokenizerError, or
    ChatTemplateError for a configured template that is none.  A spill root that cannot be used
    raises nothing: the runtime serves without it, and ``health`` says so.
    """
    config = config.checked()
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        common = (
            shared if shared is not None else await stack.enter_async_context(open_shared(config))
        )
        threads = Threads(
            engine=await stack.enter_async_context(PinnedThread("engine", THREAD_CLOSE_S)),
            host=await stack.enter_async_context(PinnedThread("host", THREAD_CLOSE_S)),
        )
        built = await build(config, common, threads)
        async with open_house(built.house_parts()) as house:
            yield Runtime(built, house, 1e3 * (time.monotonic() - started))
