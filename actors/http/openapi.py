"""``GET /openapi.json``: the routes and bodies as an OpenAPI 3.1 document."""

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
_READS = (
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/status.json",
    "/admin/cache",
)
_REFUSALS = {
    "400": "a field is wrong, or cannot be honoured",
    "401": "the API key is missing or wrong",
    "403": "host or origin may not call",
    "404": "no such model",
    "408": "the body took too long",
    "413": "the body is too large",
    "429": "as many requests as fit are in the house",
    "503": "the model cannot be loaded, its engine failed, or the server stops",
}


async def openapi(exchange: Exchange, services: Services) -> None:
    """Answer with the document."""
    await exchange.respond(msgspec.json.encode(document()))


def document() -> dict[str, Any]:
    """Return the document."""
    _, components = msgspec.json.schema_components(
        set(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    components["Error"] = {"type": "object", "required": ["error"]}
    paths: dict[str, Any] = {path: {"get": _read(path)} for path in _READS}
    for path, body in _BODIES.items():
        paths[path] = {"post": _write(body.__name__)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "millpond", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": _responses()}
    if "{name}" in path:
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    return found


def _write(body: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(),
    }


def _responses() -> dict[str, Any]:
    refused = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in _REFUSALS.items()
    }
    return {"200": {"description": "the answer"}, **refused}
