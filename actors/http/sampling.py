"""What a request's fields ask of the engine.  Pure.

Whether the engine can do it is read off ``SamplingParams``: a field that it gains is honoured here
without a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millpond.actors.http.bodies import ChatBody, CompletionBody, MessagesBody, TextBody
from millpond.actors.http.problems import FORM_FIELDS, invalid, unsupported
from millpond.codecs.choices import SamplingParams
from millpond.runtime.served import Ask

PIN_S = 3600.0  # of a pin that names no time
KNOWN = frozenset(SamplingParams.__struct_fields__)
_NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


def sampling_of(
    body: TextBody, max_tokens: int, schema: str = "", grammar: str = ""
) -> SamplingParams:
    """Return how to choose tokens.

    max_tokens  completion tokens where the body names no number
    schema      text of a JSON schema that the answers are held to, "" for none
    grammar     of a forced call of a tool, "" for none

    Raises ApiError 400 naming the field.
    """
    fields: dict[str, Any] = {
        "max_tokens": body.max_tokens or max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
        "stop": stops_of(body.stop),
        "json_schema": schema,
        "grammar": grammar,
    }
    for name, neutral in _NEUTRAL.items():
        value = _bias_of(body) if name == "logit_bias" else getattr(body, name)
        if value != neutral:
            fields[name] = value
    if (count := logprobs_of(body)) is not None:
        fields["logprobs"] = count
    for name in fields.keys() - KNOWN:
        raise unsupported(name)
    if body.seed is not None:
        fields["seed"] = body.seed % 2**63
    return checked_sampling(fields)


def ask_of(
    body: TextBody | MessagesBody, prompt: str | Sequence[int], sampling: SamplingParams
) -> Ask:
    """Return what a body asks of the model for one prompt."""
    return Ask(
        prompt=prompt,
        sampling=sampling,
        n=body.n if isinstance(body, TextBody) else 1,
        salt=body.cache_salt,
        no_store=body.no_store,
        pin=pin_of(body),
        priority=body.priority,
        deadline_s=body.deadline_s,
    )


def pin_of(body: TextBody | MessagesBody) -> float | None:
    """Return for how many seconds the prompt is to be pinned; 0: no longer, None: as it is."""
    if isinstance(body.pin, bool):
        return PIN_S if body.pin else None
    return body.pin


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings as the engine takes them; an empty text or list asks for none."""
    if not stop:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def logprobs_of(body: TextBody) -> int | None:
    """Return how many alternatives a request wants beside each token, None if no probability."""
    match body:
        case CompletionBody():
            return body.logprobs
        case ChatBody() if body.logprobs:
            return body.top_logprobs or 0
        case ChatBody() if body.top_logprobs is not None:
            raise invalid("top_logprobs", "top_logprobs: it needs logprobs to be true")
        case _:
            return None


def _bias_of(body: TextBody) -> dict[int, float]:
    found = {}
    for key, value in body.logit_bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise invalid("logit_bias", f"logit_bias: found a key {key:.20}, expected a token id")
        found[int(key)] = value
    return found


def checked_sampling(fields: dict[str, Any]) -> SamplingParams:
    """Return the parameters; raises ApiError 400 naming the field."""
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        fault, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0] or "body"
        name = FORM_FIELDS.get(name, name)
        raise invalid(name, f"{name}: {fault[:1].lower()}{fault[1:]}") from None
