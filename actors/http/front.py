"""``Front``: the outermost ASGI application: who may come in, and how every request ends.

Invariants

(I1) Every request gets exactly one response, or its client was gone.
(I2) No text of a prompt or an answer reaches a log, not even with a bug: of an unexpected error
     only its type and the places in our code are logged.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable

from anyio import current_time, get_cancelled_exc_class
from millpond.actors.http.board import Board
from millpond.actors.http.exchange import GONE, ClientGone, Exchange, Receive, Scope, Send
from millpond.actors.http.problems import ApiError, from_error
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.errors import MillpondError

_log = logging.getLogger("millpond.http")
_BEARER = re.compile(r"^bearer\s+", re.I)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
"""Paths that need no key: the page itself holds no data, and probes have none to show."""
Routes = Callable[[Exchange], Awaitable[None]]
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, x-api-key, x-request-id, anthropic-version",
    ),
    (b"access-control-max-age", b"600"),
)


class Front:
    """Wraps the routes; its requests can be refused and cut while the server stops."""

    def __init__(
        self, routes: Routes, paths: frozenset[str], board: Board, settings: HttpSettings
    ) -> None:
        """Serve ``routes``; ``paths`` are those that may label metrics."""
        self._routes, self._paths = routes, paths
        self._board, self._settings = board, settings
        # mutable state, changed only in __call__
        self._exchanges: set[Exchange] = set()

    @property
    def live(self) -> int:
        """Count of requests in the server."""
        return len(self._exchanges)

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self._board.stopping = True

    def cut(self) -> None:
        """End the requests that still run; their clients are told."""
        for exchange in self._exchanges:
            exchange.cut(_stopping(self._settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        if scope["type"] != "http":
            return
        record = _record(scope)
        exchange = Exchange((scope, receive, send), record, self._settings)
        self._exchanges.add(exchange)
        self._board.opened(record)
        try:
            await self._serve(exchange)
        except get_cancelled_exc_class():
            record.status = record.status or GONE
            raise
        finally:
            self._exchanges.discard(exchange)
            path = record.path if record.path in self._paths else "other"
            self._board.closed(record, path)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            self._check_host(exchange)
            if _is_preflight(exchange):  # browsers send no key with it
                await exchange.respond(b"", status=204, headers=_PREFLIGHT)
                return
            self._check(exchange)
            await self._routes(exchange)
        except ClientGone:
            exchange.record.status, exchange.record.code = GONE, "client_gone"
        except ApiError as error:
            await exchange.refuse(error)
        except MillpondError as error:
            await exchange.refuse(from_error(error, self._settings.retry_after_s))
        except Exception as error:
            _log.error("request id=%s failed: %s", exchange.record.id, _places(error))
            internal = ApiError(500, "internal_error", "an internal error; the log has its place")
            await exchange.refuse(internal)

    def _check_host(self, exchange: Exchange) -> None:
        """Raise ApiError for a name that is not ours, and for pages that may not call."""
        settings = self._settings
        host = exchange.header(b"host")
        if settings.hosts and _name(host) not in settings.hosts:
            raise ApiError(403, "host_forbidden", "the Host header names another server")
        origin = exchange.header(b"origin")
        if origin in settings.origins or (origin and "*" in settings.origins):
            exchange.origin = origin
        elif origin and origin.partition("://")[2] != host:
            raise ApiError(403, "origin_forbidden", "pages of this origin may not call")

    def _check(self, exchange: Exchange) -> None:
        """Raise ApiError for a request that may not come in."""
        settings = self._settings
        if settings.api_key and exchange.record.path not in OPEN_PATHS:
            given = exchange.header(b"x-api-key") or exchange.header(b"authorization")
            given = _BEARER.sub("", given).strip()
            if not hmac.compare_digest(given.encode("latin-1"), settings.api_key.encode()):
                raise ApiError(401, "invalid_api_key", "found no valid API key")
        if exchange.record.path in OPEN_PATHS:
            return
        if self._board.stopping:
            raise _stopping(settings)
        if len(self._exchanges) > settings.requests_max:
            raise ApiError(
                503,
                "too_many_requests",
                f"the server has {settings.requests_max} requests already",
                retry_s=settings.retry_after_s,
            )


def _record(scope: Scope) -> RequestRecord:
    given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
    name = given.decode("latin-1")
    return RequestRecord(
        id=name if _ID.fullmatch(name) else f"req-{secrets.token_hex(8)}",
        method=scope["method"],
        path=scope["path"],
        started_s=current_time(),
        started_at=time.time(),
    )


def _is_preflight(exchange: Exchange) -> bool:
    """Tell whether a browser asks if a page may call, which was checked."""
    asks = exchange.record.method == "OPTIONS" and bool(exchange.origin)
    return asks and bool(exchange.header(b"access-control-request-method"))


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _stopping(settings: HttpSettings) -> ApiError:
    return ApiError(
        503, "server_stopping", "the server is stopping", retry_s=settings.retry_after_s
    )


def _places(error: BaseException) -> str:
    """Return type and places of an error; its message may quote what a client sent."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_places(one) for one in error.exceptions)
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {where}"
