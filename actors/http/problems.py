"""``ApiError``: what a client is told when a request cannot be answered, and how ours become it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from millpond.runtime.errors import (
    ChatTemplateError,
    ContextExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    EngineError,
    InvalidParameter,
    KvMemoryExceeded,
    MillpondError,
    ModelError,
    ModelNotFound,
    PoolBusy,
    QueueFull,
    RequestFailed,
    RuntimeClosed,
    UnknownModel,
)

Form = Literal["openai", "anthropic"]
_FIELD = re.compile(r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*(?=:)")
"""What a message of ours begins with where it is about one field."""
FORM_FIELDS = {"json_schema": "response_format", "grammar": "tool_choice"}
"""What a client calls the forms that it asks for."""

# OpenAI's and Anthropic's names for the same kinds of error.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}

# Ours, the most special first: status, code.
_CODES: tuple[tuple[type[MillpondError], int, str], ...] = (
    (ContextExceeded, 400, "context_length_exceeded"),
    (EmptyPrompt, 400, "empty_prompt"),
    (UnknownModel, 404, "model_not_found"),
    (PoolBusy, 503, "model_busy"),
    (KvMemoryExceeded, 400, "kv_memory_exceeded"),
    (DeadlineExceeded, 504, "deadline_exceeded"),
    (QueueFull, 429, "queue_full"),
    (InvalidParameter, 400, "invalid_value"),
    (RequestFailed, 500, "generation_failed"),
    (RuntimeClosed, 503, "model_closing"),
    (EngineError, 503, "engine_failed"),
    (ChatTemplateError, 400, "chat_template_failed"),
    (ModelNotFound, 503, "model_load_failed"),
    (ModelError, 503, "model_load_failed"),
)


@dataclass(slots=True)
class ApiError(Exception):
    """A request that is not answered.

    status   HTTP status
    code     what a client can act on
    message  for people; never a prompt's text
    param    the field of the body that is at fault, or None
    retry_s  seconds after which another try makes sense, or None
    allow    methods that the path has, where another one was used
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_s: int | None = None
    allow: str = ""

    def body(self, form: Form) -> dict[str, Any]:
        """Return the JSON body in OpenAI's or Anthropic's form."""
        kinds = _TYPES.get(self.status, _kinds(self.status))
        if form == "anthropic":
            told = {"type": kinds[1], "message": self.message, "code": self.code}
            return {"type": "error", "error": told}
        return {
            "error": {
                "message": self.message,
                "type": kinds[0],
                "param": self.param,
                "code": self.code,
            }
        }

    def encoded(self, form: Form) -> bytes:
        """Return the body as JSON."""
        return msgspec.json.encode(self.body(form))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that go with it."""
        found = [(b"content-type", b"application/json")]
        if self.retry_s is not None:
            found.append((b"retry-after", str(self.retry_s).encode()))
        if self.allow:
            found.append((b"allow", self.allow.encode()))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def from_error(error: MillpondError, retry_s: int) -> ApiError:
    """Return what a client is told of one of our errors."""
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            retry = retry_s if status in (429, 503) else None
            return ApiError(status, code, str(error), _param(error), retry)
    return ApiError(500, "server_error", str(error))


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the error for a parameter that this server knows, and cannot honour."""
    reason = why or "this server does not support it"
    return ApiError(400, "unsupported_parameter", f"{param}: {reason}", param)


def invalid(param: str, message: str) -> ApiError:
    """Return the error for a field of the wrong type or range."""
    return ApiError(400, "invalid_value", message, param)


def _kinds(status: int) -> tuple[str, str]:
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return ("invalid_request_error", "invalid_request_error")
    return ("server_error", "api_error")


def _param(error: MillpondError) -> str | None:
    match error:
        case UnknownModel():
            return "model"
        case InvalidParameter():
            found = _FIELD.match(str(error))
            name = found[0] if found is not None else None
            return FORM_FIELDS.get(name, name) if name is not None else None
        case ChatTemplateError():
            return "messages"
        case _:
            return None
