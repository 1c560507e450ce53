"""A loaded model as a server sees it: ``ServedModel``, and what makes a ``Runtime`` one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from anyio import CapacityLimiter, to_thread
from millpond.codecs.choices import SamplingParams
from millpond.runtime.chat import ChatOptions
from millpond.runtime.chat_defaults import default_template
from millpond.runtime.chat_encoder import ChatEncoder
from millpond.runtime.errors import ContextExceeded, InvalidParameter
from millpond.runtime.figures import ModelFigures, RootFigures, figures_of, summed
from millpond.runtime.guidance import can_guide
from millpond.runtime.results import Completion, StreamedToken

if TYPE_CHECKING:
    from millpond.runtime.api import Runtime
    from millpond.runtime.tokenizer import Tokenizer

__all__ = [
    "Ask",
    "ModelFigures",
    "Reading",
    "RootFigures",
    "RuntimeModel",
    "ServedModel",
    "serve_runtime",
    "summed",
]

Found = TypeVar("Found")
NAMESPACE_DIGITS = 16
"""Hex digits of a fingerprint that name a model's folder in the spill root."""


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
    """What a model is asked: a prompt, how to go on, and how its cache may be used.

    n                     answers, over rows that are computed once
    pin, priority, deadline_s  as ``RequestOptions`` has them
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams
    salt: str = ""
    no_store: bool = False
    pin: float | None = None
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None


class ServedModel(Protocol):
    """What a server needs of a loaded model; used on the event loop.

    context_tokens   tokens that prompt and completion may reach
    end_ids          ids that end a completion
    template         Jinja source of the chat template, ``""`` for none
    can_pin          whether ``Ask.pin`` is honoured
    can_guide        whether ``SamplingParams.json_schema`` is
    problem          why it serves no request, ``""`` while it does
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
    @property
    def problem(self) -> str: ...

    def stream(self, ask: Ask) -> AbstractAsyncContextManager[Sequence[Reading]]:
        """Submit; one reading for each answer.  Leaving the block early cancels them.

        Raises as ``Runtime.stream_choices`` does.
        """

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> list[int]:
        """Return a chat's ids.  Raises InvalidParameter, ContextExceeded, ChatTemplateError."""

    async def encode(self, text: str, with_bos: bool) -> list[int]:
        """Return a text's ids.  Raises InvalidParameter, ContextExceeded."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; raises InvalidParameter for an id that there is not."""

    def special_text(self, token_id: int) -> str:
        """Return the name of a control token without text of its own, ``""`` for any other."""

    def special_id(self, text: str) -> int | None:
        """Return the id of such a token by its name, None if other tokens give the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text, for a control token its name."""

    def figures(self) -> ModelFigures:
        """Return what goes on."""


def request_options() -> frozenset[str]:
    """Return the names of the options that a runtime takes."""
    from millpond.runtime.api import RequestOptions

    return frozenset(RequestOptions.__annotations__)


async def serve_runtime(runtime: Runtime, encoders: CapacityLimiter) -> RuntimeModel:
    """Return a Runtime as a ServedModel.

    encoders  bounds the threads that tokenise; shared by the models of a pool
    """
    longest = await to_thread.run_sync(
        lambda: max(map(len, runtime.identity.vocabulary.tokens), default=1), limiter=encoders
    )
    return RuntimeModel(runtime, encoders, max(1, longest))


def _decoded(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidParameter(
                f"tokens: found {token_id}, expected ids from 0 to {tokenizer.vocab_size - 1}"
            )
    return tokenizer.decode(token_ids)


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
        self.can_pin = "pin" in request_options()
        self.can_guide = can_guide()
        # every character of a text takes a byte of some token at least
        self._characters_max = self.context_tokens * token_bytes_max
        # some files give a mark's token its text, as Gemma 4's ``<|tool_call>``: that needs no name
        self._special_ids = {
            text: found
            for text, found in tokenizer.control_texts.items()
            if not tokenizer.piece(found)
        }
        self._special = {found: text for text, found in self._special_ids.items()}

    def __repr__(self) -> str:
        return f"<RuntimeModel {self._runtime!r}>"

    @property
    def problem(self) -> str:
        """Why it serves no request, ``""`` while it does."""
        return self._runtime.problem

    def stream(self, ask: Ask) -> AbstractAsyncContextManager[Sequence[Reading]]:
        """Submit; leaving the block early cancels.  Raises as ``Runtime.stream_choices`` does."""
        self._check_length(ask.prompt)
        options: Any = {"salt": ask.salt, "no_store": ask.no_store, "priority": ask.priority}
        if ask.deadline_s is not None:
            options["deadline_s"] = ask.deadline_s
        if ask.pin is not None and self.can_pin:
            options["pin"] = ask.pin
        return self._runtime.stream_choices(ask.prompt, ask.n, ask.sampling, **options)

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
        return await self._call(partial(_decoded, self._runtime.tokenizer, token_ids))

    def special_text(self, token_id: int) -> str:
        """Return the name of a control token without text of its own, ``""`` for any other."""
        return self._special.get(token_id, "")

    def special_id(self, text: str) -> int | None:
        """Return the id of such a token by its name, None if other tokens give the text."""
        return self._special_ids.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text, for a control token its name."""
        return self._runtime.tokenizer.raw_piece(token_id)

    def figures(self) -> ModelFigures:
        """Return what goes on."""
        return figures_of(self._runtime, self.fingerprint[:NAMESPACE_DIGITS])

    def _check_length(self, prompt: str | Sequence[int]) -> None:
        if isinstance(prompt, str) and len(prompt) > self._characters_max:
            raise ContextExceeded(
                f"prompt: found {len(prompt)} characters, expected at most {self._characters_max} "
                f"in a context of {self.context_tokens} tokens"
            )

    async def _call(self, function: Callable[[], Found]) -> Found:
        """Run on a thread; a caller that is cancelled leaves the thread to end on its own."""
        return await to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._encoders)
