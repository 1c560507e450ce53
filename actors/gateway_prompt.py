"""From what a caller asks to a Submit: tokenised, checked, hashed.  On a worker thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import msgspec
from millpond.actors.gateway_request import GatewayTokenizer
from millpond.codecs.choices import PIN_S_MAX, AnswerForm, SamplingParams
from millpond.codecs.fingerprint import ReuseTag, chain_root
from millpond.codecs.messages import Submit
from millpond.runtime.config import Limits
from millpond.runtime.errors import (
    ContextExceeded,
    EmptyPrompt,
    InvalidParameter,
    KvMemoryExceeded,
)
from millpond.runtime.kv.blocks import block_chain, pack_tokens
from millpond.runtime.threads import Worker

PRIORITY_MAX = 100
CHOICES_MAX = 1024  # as many as a random key tells apart


def _no_form(form: AnswerForm) -> None:
    raise InvalidParameter(f"{form.kind}: this model cannot be held to one")


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
    check_form      raises InvalidParameter for a form that answers cannot be held to; runs on
                    ``thread``
    memory_tokens   tokens of one request that the memory for live caches holds, None: any
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
    check_form: Callable[[AnswerForm], None] = _no_form
    memory_tokens: int | None = None


_DEFAULT_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a caller asks with.

    content     text, or token ids taken verbatim
    sampling    how to choose tokens
    salt        keeps this caller's cache apart; empty: shared
    no_store    neither read nor write the spill root, nor share rows with other requests
    priority    -100 to 100; the higher goes first
    deadline_s  seconds from now in which it must end; None: no deadline
    pin         seconds for which no block of the prompt is evicted, from the request's end on; 0
                ends that; None: as it is
    """

    content: str | Ordered[int]
    sampling: SamplingParams = _DEFAULT_SAMPLING
    salt: str = ""
    no_store: bool = False
    priority: int = 0
    deadline_s: float | None = None
    pin: float | None = None


def checked(prompt: Prompt, choices: int) -> tuple[SamplingParams, ...]:
    """Return how to choose the tokens of each choice; raises InvalidParameter."""
    if type(choices) is not int or not 1 <= choices <= CHOICES_MAX:
        raise InvalidParameter(f"n: found {choices!r}, expected from 1 to {CHOICES_MAX}")
    priority, deadline_s, pin = prompt.priority, prompt.deadline_s, prompt.pin
    if type(priority) is not int or abs(priority) > PRIORITY_MAX:
        raise InvalidParameter(
            f"priority: found {priority!r}, expected from -{PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    if deadline_s is not None and (
        not isinstance(deadline_s, int | float) or math.isnan(deadline_s) or deadline_s <= 0
    ):
        raise InvalidParameter(f"deadline_s: found {deadline_s!r}, expected more than 0 seconds")
    if pin is not None and (type(pin) not in (int, float) or not 0 <= pin <= PIN_S_MAX):
        raise InvalidParameter(f"pin: found {pin!r}, expected from 0 to {PIN_S_MAX:.0f} seconds")
    if not isinstance(prompt.salt, str):
        raise InvalidParameter(f"salt: found {type(prompt.salt).__name__}, expected a text")
    if not _is_text(prompt.salt):
        raise InvalidParameter("salt: found a lone surrogate, expected a text")
    if pin and prompt.no_store:
        raise InvalidParameter("pin: found a request that stores nothing, expected one that does")
    try:
        sampling = msgspec.convert(msgspec.to_builtins(prompt.sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidParameter(f"sampling: {error}") from error
    if choices == 1:
        return (sampling,)
    return tuple(msgspec.structs.replace(sampling, choice=index) for index in range(choices))


def prepare(parts: GatewayParts, prompt: Prompt, sampling: SamplingParams) -> Submit:
    """Tokenise, check, hash; the request id is still to be given.

    Raises EmptyPrompt, InvalidParameter, ContextExceeded or KvMemoryExceeded.
    """
    if sampling.json_schema and sampling.grammar:
        raise InvalidParameter("grammar: found a JSON schema beside it, expected one of them")
    if (form := sampling.form) is not None:
        parts.check_form(form)
    ids = _token_ids(parts, prompt.content)
    _check_length(parts, len(ids))
    packed = pack_tokens(ids)
    root = chain_root(parts.fingerprint, parts.guard, parts.reuse, prompt.salt)
    return Submit(
        request_id=0,
        token_ids=packed,
        root=root,
        chain=block_chain(parts.fingerprint, root, packed, parts.block_tokens),
        sampling=sampling,
        no_store=prompt.no_store,
        priority=prompt.priority,
        pin_s=float(prompt.pin) if prompt.pin is not None else None,
    )


def _check_length(parts: GatewayParts, tokens: int) -> None:
    """Raise ContextExceeded or KvMemoryExceeded."""
    if tokens >= parts.context_tokens:
        raise ContextExceeded(
            f"prompt: found {tokens} tokens, expected at most {parts.context_tokens - 1} "
            f"in a context of {parts.context_tokens}"
        )
    if parts.memory_tokens is not None and tokens >= parts.memory_tokens:
        raise KvMemoryExceeded(
            f"prompt: found {tokens} tokens, expected at most {parts.memory_tokens - 1}: the "
            f"memory for live caches holds {parts.memory_tokens} of one request"
        )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_ids(parts: GatewayParts, content: str | Ordered[int]) -> Ordered[int]:
    if isinstance(content, str):
        if not content:
            raise EmptyPrompt("prompt: found no text, expected at least one character")
        ids: Ordered[int] = parts.tokenizer.encode_prompt(content)
    else:
        ids = content
    if isinstance(ids, bytes | bytearray) or not isinstance(ids, Ordered):
        raise InvalidParameter(
            f"prompt: found {type(ids).__name__}, expected a text or a sequence of token ids"
        )
    if not len(ids):
        raise EmptyPrompt("prompt: found no token, expected at least one")
    size = parts.tokenizer.vocab_size
    _check_length(parts, len(ids))  # before each of them is looked at: there may be a million
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < size:
            raise InvalidParameter(
                f"token ids: found {token_id!r}, expected an integer from 0 to {size - 1}"
            )
    return ids
