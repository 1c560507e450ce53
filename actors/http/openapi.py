"""``GET /openapi.json``: the routes, bodies and answers as an OpenAPI 3.1 document."""

from __future__ import annotations

from typing import Any

import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.bodies import (
    ChatBody,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    LoadBody,
    MessagesBody,
    TokenizeBody,
)
from millpond.actors.http.exchange import Exchange

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/models/load": LoadBody,
    "/admin/models/unload": LoadBody,
}
# Fields that every answer has, and their JSON types.
_ANSWERS: dict[str, dict[str, str]] = {
    "/v1/completions": {
        "id": "string",
        "object": "string",
        "created": "integer",
        "model": "string",
        "choices": "array",
        "usage": "object",
        "millpond": "object",
    },
    "/v1/messages": {
        "id": "string",
        "type": "string",
        "role": "string",
        "model": "string",
        "content": "array",
        "usage": "object",
    },
    "/v1/messages/count_tokens": {"input_tokens": "integer"},
    "/tokenize": {"tokens": "array", "count": "integer", "max_model_len": "integer"},
    "/detokenize": {"content": "string", "prompt": "string"},
    "/admin/models/load": {"model": "string", "loaded": "boolean"},
    "/admin/models/unload": {"model": "string", "loaded": "boolean", "was_loaded": "boolean"},
    "/v1/models": {"object": "string", "data": "array"},
    "/v1/models/{name}": {"id": "string", "object": "string", "created": "integer"},
    "/health": {"status": "string", "live": "boolean", "ready": "boolean", "reasons": "array"},
    "/health/live": {"live": "boolean"},
    "/health/ready": {"status": "string", "ready": "boolean", "reasons": "array"},
    "/status.json": {"live": "array", "ended": "array", "totals": "object", "models": "object"},
    "/admin/cache": {"models": "object"},
}
_ANSWERS["/v1/chat/completions"] = _ANSWERS["/v1/completions"]
_STREAMED = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/messages"))
_HEALTH = frozenset(("/health", "/health/live", "/health/ready"))
_TEXTS = {"/metrics": "text/plain", "/": "text/html"}
_ANSWERED_READS = [path for path in _ANSWERS if path not in _BODIES]
_READS = (*_ANSWERED_READS, *_TEXTS)
_REFUSALS = {
    "400": "a field is wrong, or cannot be honoured",
    "401": "the API key is missing or wrong",
    "403": "host or origin may not call",
    "404": "no such model",
    "405": "the method is not allowed here",
    "408": "the body took too long",
    "413": "the body is too large",
    "429": "as many requests as fit are in the house; Retry-After says when to come back",
    "500": "the engine failed in this request",
    "503": "the model cannot be loaded, its engine failed, or the server stops",
    "504": "the request took longer than it may",
}


async def openapi(exchange: Exchange, services: Services) -> None:
    """Answer with the document."""
    await exchange.respond(msgspec.json.encode(document()))


def document() -> dict[str, Any]:
    """Return the document."""
    _, schemas = msgspec.json.schema_components(
        set(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _read(path)} for path in _READS}
    for path, body in _BODIES.items():
        paths[path] = {"post": _write(path, body.__name__)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "millpond", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _error(), "AnthropicError": _anthropic_error()},
            "responses": {
                f"{kind}{status}": _refusal(kind, text)
                for kind in ("Error", "AnthropicError")
                for status, text in _REFUSALS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": _responses(path)}
    if "{name}" in path:
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    return found


def _write(path: str, body: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(path),
    }


def _responses(path: str) -> dict[str, Any]:
    kind = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    found: dict[str, Any] = {
        status: {"$ref": f"#/components/responses/{kind}{status}"}
        for status in _REFUSALS
        if not (status == "503" and path in _HEALTH)
    }
    if path in _HEALTH:  # what is wrong is said in the same form
        found["503"] = {"description": "requests are not taken", "content": _content(path)}
    return {"200": {"description": "the answer", "content": _content(path)}, **found}


def _content(path: str) -> dict[str, Any]:
    if path in _TEXTS:
        return {_TEXTS[path]: {"schema": {"type": "string"}}}
    fields = _ANSWERS[path]
    properties = {name: {"type": kind} for name, kind in fields.items()}
    schema: dict[str, Any] = _object(properties)
    found: dict[str, Any] = {"application/json": {"schema": schema}}
    if path in _STREAMED:
        found["text/event-stream"] = {}
    return found


def _refusal(kind: str, text: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _error() -> dict[str, Any]:
    fields: dict[str, Any] = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": "string"},
    }
    return _object({"error": _object(fields)})


def _anthropic_error() -> dict[str, Any]:
    fields: dict[str, Any] = {name: {"type": "string"} for name in ("type", "message", "code")}
    return _object({"type": {"const": "error"}, "error": _object(fields)})


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "properties": fields}
