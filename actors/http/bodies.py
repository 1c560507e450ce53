"""Bodies of requests: JSON bytes → checked structs, with OpenAI's kind of error for what is wrong.

A field that is null counts as absent.  A field that OpenAI knows and that changes the answer is
refused unless it can be honoured; one that changes nothing here is ignored; any other is unknown.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from millpond.actors.http.problems import ApiError, unsupported
from millpond.codecs.choices import PinSeconds

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, msgspec.Meta(max_length=256)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Mass = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]
Deadline = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
Message = dict[str, Any]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``: whether the last chunk before the end gives the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextBody(msgspec.Struct, frozen=True, kw_only=True):
    """What every form of a request for text may say; names and meaning as in OpenAI's API.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``cache_salt`` (keeps a tenant's
    cache apart), ``no_store`` (neither read nor write the spill root), ``pin`` (seconds for which
    the blocks of the prompt stay; true: an hour), ``priority`` and ``deadline_s`` are extensions.
    """

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Positive = 1
    max_tokens: Positive | None = None
    temperature: Temperature = 1.0
    top_p: Mass = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Share = 0.0
    seed: Seed | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=4096)] = {}
    cache_salt: Salt = ""
    no_store: bool = False
    pin: bool | PinSeconds = False
    priority: Priority = 0
    deadline_s: Deadline | None = None


class CompletionBody(TextBody, frozen=True, kw_only=True):
    """``/v1/completions``: a text, a list of texts, one list of ids, or a list of such lists."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class ChatBody(TextBody, frozen=True, kw_only=True):
    """``/v1/chat/completions``; ``chat_template_kwargs`` are further variables of the template."""

    messages: list[Message]
    max_completion_tokens: Positive | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/v1/messages``, Anthropic's form."""

    messages: list[Message]
    max_tokens: Positive
    model: Name | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    temperature: Temperature = 1.0
    top_p: Mass = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    stop_sequences: list[str] = []
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_salt: Salt = ""
    no_store: bool = False
    pin: bool | PinSeconds = False
    priority: Priority = 0
    deadline_s: Deadline | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/v1/messages/count_tokens``."""

    messages: list[Message]
    model: Name | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/tokenize``: a text (``prompt`` or ``content``) or the messages of a chat.

    add_special_tokens     begin a text with BOS as the model wants it
    add_generation_prompt  end a chat with the beginning of the model's turn
    """

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/detokenize``."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]
    model: Name | None = None


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/admin/models/load`` and ``/unload``; ``keep_alive`` in seconds, below 0: for ever."""

    model: Name
    keep_alive: float | None = None


# Fields that change nothing here, whatever they say.
_IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "reasoning_effort",
        "thinking",
        "container",
        "context_management",
        "mcp_servers",
        "inference_geo",
    )
)
# Fields that OpenAI or Anthropic know, and the values with which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "n": (1,),
    "logprobs": (False,),
}
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
BodyKind = TypeVar("BodyKind", bound=msgspec.Struct)


def parse(data: bytes, kind: type[BodyKind]) -> BodyKind:
    """Return the body; raises ApiError 400 that names the field.

    It runs on the event loop, as decoding holds the interpreter's lock wherever it runs; what
    ``Exchange.read_body`` lets through takes some ten milliseconds at most.
    """
    try:
        found = _FIELDS.decode(data)
        given = {name: raw for name, raw in found.items() if bytes(raw) != b"null"}
        for name in given.keys() - frozenset(kind.__struct_encode_fields__):
            _check_unknown(name, given.pop(name))
        parts = (b"%s:%s" % (msgspec.json.encode(name), raw) for name, raw in given.items())
        return msgspec.json.decode(b"{%s}" % b",".join(parts), type=kind)
    except msgspec.ValidationError as error:
        if str(error).startswith("Expected `object`, got") and "$" not in str(error):
            raise ApiError(400, "invalid_json", "the body is no JSON object") from None
        raise _invalid(str(error)) from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is no JSON: {error}") from None


def _check_unknown(name: str, raw: msgspec.Raw) -> None:
    if name in _IGNORED:
        return
    if name not in _NEUTRAL:
        raise ApiError(400, "unknown_parameter", f"{name:.80}: no such parameter", f"{name:.80}")
    if msgspec.json.decode(raw) not in _NEUTRAL[name]:
        raise unsupported(name)


def _invalid(message: str) -> ApiError:
    """Name the field: ``Expected … - at `$.stop[0]``` → ``stop[0]: expected …``."""
    match = re.fullmatch(r"(?P<fault>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", message, re.S)
    assert match is not None, "the path is optional"
    fault, path = match["fault"], match["path"]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", fault)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, "missing_parameter", f"{path}: it is required", path)
    code = "invalid_type" if re.search(r", got `\w+`$", fault) else "invalid_value"
    text = fault[:1].lower() + fault[1:]
    return ApiError(400, code, f"{path}: {text}" if path else text, path or None)
