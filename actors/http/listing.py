"""``GET /v1/models``: the models that may be asked for."""

from __future__ import annotations

from typing import Any

import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.problems import ApiError
from millpond.runtime.pool import ModelEntry


async def list_models(exchange: Exchange, services: Services) -> None:
    """Answer with all of them."""
    entries = await services.pool.entries()
    listed = [_model(entry, services) for entry in entries]
    await exchange.respond(msgspec.json.encode({"object": "list", "data": listed}))


async def one_model(exchange: Exchange, services: Services) -> None:
    """Answer with the one that the path names; raises ApiError 404."""
    name = exchange.scope["path_params"]["name"]
    for entry in await services.pool.entries():
        if entry.name == name:
            await exchange.respond(msgspec.json.encode(_model(entry, services)))
            return
    raise ApiError(404, "model_not_found", f"model: found {name!r:.200}", "model")


def _model(entry: ModelEntry, services: Services) -> dict[str, Any]:
    """Return a model in OpenAI's form; ``millpond`` holds what that has no place for."""
    model = services.pool.loaded().get(entry.name)
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.modified_at,
        "owned_by": "millpond",
        "millpond": {
            "state": entry.state,
            "file_bytes": entry.file_bytes,
            "context_tokens": None if model is None else model.context_tokens,
            "fingerprint": None if model is None else model.fingerprint,
        },
    }
