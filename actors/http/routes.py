"""The routes of the server, and what makes an endpoint of a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from anyio import CapacityLimiter
from millpond.actors.http.admin import cache_figures, load_model, unload_model
from millpond.actors.http.answering import Services
from millpond.actors.http.board import Board
from millpond.actors.http.chat import chat_completions
from millpond.actors.http.completions import completions
from millpond.actors.http.exchange import Exchange, Receive, Scope, Send
from millpond.actors.http.front import Front
from millpond.actors.http.health import health, live, metrics, ready
from millpond.actors.http.listing import list_models, one_model
from millpond.actors.http.messages import count_tokens, messages
from millpond.actors.http.openapi import openapi
from millpond.actors.http.problems import ApiError
from millpond.actors.http.settings import HttpSettings
from millpond.actors.http.status import status_data, status_events, status_page
from millpond.actors.http.tokens import detokenize, tokenize
from millpond.runtime.pool import ModelPool
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

Serve = Callable[[Exchange, Services], Awaitable[None]]
_EXCHANGE = "millpond.exchange"

_ROUTES: tuple[tuple[str, str, Serve], ...] = (
    ("GET", "/", status_page),
    ("GET", "/status.json", status_data),
    ("GET", "/status/events", status_events),
    ("GET", "/health", health),
    ("GET", "/health/live", live),
    ("GET", "/health/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", openapi),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", one_model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/admin/models/load", load_model),
    ("POST", "/admin/models/unload", unload_model),
    ("GET", "/admin/cache", cache_figures),
)
PATHS = frozenset(path for _, path, _ in _ROUTES)


class Endpoint:
    """A function as an ASGI application; it speaks through the Exchange that Front made."""

    def __init__(self, serve: Serve, services: Services) -> None:
        self._serve, self._services = serve, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._serve(scope[_EXCHANGE], self._services)


def make_app(services: Services) -> Front:
    """Return the whole server as an ASGI application."""
    listed = [
        Route(path, Endpoint(serve, services), methods=[method]) for method, path, serve in _ROUTES
    ]
    router = Router(listed, redirect_slashes=False)

    async def routes(exchange: Exchange) -> None:
        # with "app" the router raises what it finds wrong, instead of answering in its own form
        scope: dict[str, Any] = exchange.scope | {_EXCHANGE: exchange, "app": router}
        exchange.scope = scope
        try:
            await router(scope, cast(Any, exchange.receive), cast(Any, exchange.send))
        except HTTPException as error:
            raise _routing_error(error, exchange) from None

    return Front(routes, PATHS, services.board, services.settings)


def _routing_error(error: HTTPException, exchange: Exchange) -> ApiError:
    record = exchange.record
    if error.status_code == 405:
        return ApiError(
            405,
            "method_not_allowed",
            f"{record.method:.20} is not allowed here",
            allow=(error.headers or {}).get("Allow", ""),
        )
    return ApiError(404, "not_found", f"no route for {record.method} {record.path:.200}")


def make_services(pool: ModelPool, settings: HttpSettings) -> Services:
    """Return what the endpoints work with."""
    readers = CapacityLimiter(settings.readers_max)
    return Services(pool, settings, Board(pool, settings), readers)
