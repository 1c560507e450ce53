"""What the bodies of requests hold, and the fields that are ignored or refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
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
IGNORED = frozenset(
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
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
