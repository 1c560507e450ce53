"""A loaded model as a server sees it: ``ServedModel``, and what makes a ``Runtime`` one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from anyio import CapacityLimiter, to_thread
from millpond.codecs.choices import SamplingParams
from millpond.runtime.chat import ChatOptions
from millpond.runtime.chat_defaults import default_template
from millpond.runtime.chat_encoder import ChatEncoder
from millpond.runtime.errors import ContextExceeded, InvalidParameter
from millpond.runtime.guidance import can_guide
from millpond.runtime.results import Completion, StreamedToken

if TYPE_CHECKING:
    from millpond.runtime.api import Runtime

Found = TypeVar("Found")
NAMESPACE_DIGITS = 16
"""Hex digits of a fingerprint that name a model's folder in the spill root."""


@dataclass(frozen=True, slots=True)
class RootFigures:
    """The spill root that all models share: blocks, bytes by use and its bound, evictions ever.

    namespaces  (namespace, blocks, bytes) of each model that wrote some, in this process or before
    """

    blocks: int = 0
    block_bytes: int = 0
    used_bytes: int = 0
    quarantine_bytes: int = 0
    bytes_max: int = 0
    evicted_blocks: int = 0
    quarantined_blocks: int = 0
    problem: str = ""
    namespaces: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """One loaded model now: requests by state, counts since it was loaded, and what is wrong.

    live, waiting, running, restoring  requests in the house, before a live cache, with one, reading
    slots_lent, slots_lost             staging slots in use, and lost for good
    refused                            blocks offered and not kept
    namespace                          name of its folder in the root
    """

    live: int = 0
    waiting: int = 0
    running: int = 0
    restoring: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    refused: int = 0
    restored_blocks: int = 0
    restored_bytes: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    slots_lent: int = 0
    slots_lost: int = 0
    problem: str = ""
    spill_problem: str = ""
    root: RootFigures | None = None
    namespace: str = ""


_COUNTS = (
    "prefilled_tokens",
    "decoded_tokens",
    "spilled_blocks",
    "spilled_bytes",
    "refused",
    "restored_blocks",
    "restored_bytes",
)


def summed(earlier: ModelFigures, now: ModelFigures) -> ModelFigures:
    """Return the figures of now, with what an earlier house of the model counted."""
    counts = {name: getattr(earlier, name) + getattr(now, name) for name in _COUNTS}
    return replace(now, **counts)


class Reading(Protocol):
    """A request's tokens as they come; the result once they ended."""

    def __aiter__(self) -> Reading:
        """Return itself."""

    async def __anext__(self) -> StreamedToken:
        """Return the next token; raises the request's error."""

    async def result(self) -> Completion:
        """Return the completion; raises the request's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a model is asked: a prompt, how to go on, and how its cache may be used."""

    prompt: str | Sequence[int]
    sampling: SamplingParams
    salt: str = ""
    no_store: bool = False
    pin: bool = False


class ServedModel(Protocol):
    """What a server needs of a loaded model; used on the event loop.

    context_tokens   tokens that prompt and completion may reach
    end_ids          ids that end a completion
    template         Jinja source of the chat template, ``""`` for none
    can_pin          whether ``Ask.pin`` is honoured
    can_guide        whether ``SamplingParams.json_schema`` is
    """

    @property
    def context_tokens(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def template(self) -> str: ...
    @property
    def can_pin(self) -> bool: ...
    @property
    def can_guide(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...

    def stream(self, ask: Ask) -> AbstractAsyncContextManager[Reading]:
        """Submit; leaving the block early cancels.  Raises as ``Runtime.stream`` does."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> list[int]:
        """Return a chat's ids.  Raises InvalidParameter, ContextExceeded, ChatTemplateError."""

    async def encode(self, text: str, with_bos: bool) -> list[int]:
        """Return a text's ids.  Raises InvalidParameter, ContextExceeded."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; raises InvalidParameter for an id that there is not."""

    def special_text(self, token_id: int) -> str:
        """Return the name of a control token, ``""`` for any other."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text, for a control token its name."""

    def figures(self) -> ModelFigures:
        """Return what goes on."""


async def serve_runtime(runtime: Runtime, encoders: CapacityLimiter) -> RuntimeModel:
    """Return a Runtime as a ServedModel.

    encoders  bounds the threads that tokenise; shared by the models of a pool
    """
    longest = await to_thread.run_sync(
        lambda: max(map(len, runtime.identity.vocabulary.tokens), default=1), limiter=encoders
    )
    return RuntimeModel(runtime, encoders, max(1, longest))


class RuntimeModel:
    """A ``Runtime`` as a ServedModel; made by ``serve_runtime``."""

    def __init__(self, runtime: Runtime, encoders: CapacityLimiter, token_bytes_max: int) -> None:
        self._runtime, self._encoders = runtime, encoders
        identity, tokenizer = runtime.identity, runtime.tokenizer
        self.context_tokens = identity.config.context_tokens
        self.end_ids = tokenizer.end_ids
        # a family's turns stand in for a template that the file does not bring
        default = "" if runtime.chat_template else default_template(identity.config.family)
        self._chats = ChatEncoder(tokenizer, default) if default else None
        self.template = runtime.chat_template or default
        self.fingerprint = identity.fingerprint.hex()
        self.can_pin = "pin" in inspect.signature(runtime.stream).parameters
        self.can_guide = can_guide()
        # every character of a text takes a byte of some token at least
        self._characters_max = self.context_tokens * token_bytes_max
        self._special = {value: text for text, value in tokenizer.control_texts.items()}

    def __repr__(self) -> str:
        return f"<RuntimeModel {self._runtime!r}>"

    def stream(self, ask: Ask) -> AbstractAsyncContextManager[Reading]:
        """Submit; leaving the block early cancels.  Raises as ``Runtime.stream`` does."""
        self._check_length(ask.prompt)
        pin: dict[str, Any] = {"pin": True} if ask.pin and self.can_pin else {}
        return self._runtime.stream(
            ask.prompt, ask.sampling, salt=ask.salt, no_store=ask.no_store, **pin
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> list[int]:
        """Return a chat's ids, on a thread.

        Raises InvalidParameter, ContextExceeded, ChatTemplateError.
        """
        if self._chats is None:
            return await self._runtime.encode_chat(messages, options)
        return await self._call(partial(self._chats.encode, messages, options))

    async def encode(self, text: str, with_bos: bool) -> list[int]:
        """Return a text's ids, on a thread.  Raises InvalidParameter, ContextExceeded."""
        self._check_length(text)
        tokenizer = self._runtime.tokenizer
        return await self._call(
            partial(tokenizer.encode_prompt if with_bos else tokenizer.encode, text)
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, on a thread; raises InvalidParameter for one there is not."""
        tokenizer = self._runtime.tokenizer
        for token_id in token_ids:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise InvalidParameter(
                    f"tokens: found {token_id}, expected ids from 0 to {tokenizer.vocab_size - 1}"
                )
        return await self._call(partial(tokenizer.decode, token_ids))

    def special_text(self, token_id: int) -> str:
        """Return the name of a control token, ``""`` for any other."""
        return self._special.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text, for a control token its name."""
        return self._runtime.tokenizer.raw_piece(token_id)

    def figures(self) -> ModelFigures:
        """Return what goes on."""
        found, health = self._runtime.statistics(), self._runtime.health()
        store, engine, root = found.store, found.engine, found.store.root
        return ModelFigures(
            live=found.gateway.live,
            waiting=engine.waiting + store.waiting,
            running=engine.running,
            restoring=store.restoring,
            prefilled_tokens=engine.prefilled_tokens,
            decoded_tokens=engine.decoded_tokens,
            spilled_blocks=store.spilled_blocks,
            spilled_bytes=store.spilled_bytes,
            refused=store.refused + engine.refused,
            restored_blocks=store.restored_blocks,
            restored_bytes=store.restored_bytes,
            misses={str(reason): count for reason, count in store.misses.items()},
            slots_lent=sum(pool.lent for pool in found.pools),
            slots_lost=sum(pool.lost for pool in found.pools),
            problem=health.problem,
            spill_problem=health.spill_problem,
            root=None
            if root is None
            else RootFigures(
                blocks=root.blocks,
                block_bytes=root.block_bytes,
                used_bytes=root.block_bytes
                + root.reserved_bytes
                + root.doomed_bytes
                + root.quarantine_bytes
                + root.other_bytes,
                quarantine_bytes=root.quarantine_bytes,
                bytes_max=root.bytes_max,
                evicted_blocks=root.evicted_blocks,
                quarantined_blocks=root.quarantined_blocks,
                problem=root.problem,
                namespaces=tuple((one.name, one.blocks, one.bytes) for one in root.namespaces),
            ),
            namespace=self.fingerprint[:NAMESPACE_DIGITS],
        )

    def _check_length(self, prompt: str | Sequence[int]) -> None:
        if isinstance(prompt, str) and len(prompt) > self._characters_max:
            raise ContextExceeded(
                f"prompt: found {len(prompt)} characters, expected at most {self._characters_max} "
                f"in a context of {self.context_tokens} tokens"
            )

    async def _call(self, function: Callable[[], Found]) -> Found:
        """Run on a thread; a caller that is cancelled leaves the thread to end on its own."""
        return await to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._encoders)
