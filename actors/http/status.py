"""``GET /``: the status page, and the data that it shows, once or live."""

from __future__ import annotations

from importlib.resources import files

import anyio
import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.exchange import EventStream, Exchange, data_event
from millpond.actors.http.problems import ApiError

_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
_PAGE = files("millpond.actors.http").joinpath("status.html").read_bytes()


async def status_page(exchange: Exchange, services: Services) -> None:
    """Answer with the page; it holds no data."""
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", _POLICY),
        (b"x-frame-options", b"DENY"),
        (b"cache-control", b"no-cache"),
    ]
    await exchange.respond(_PAGE, headers=headers)


async def status_data(exchange: Exchange, services: Services) -> None:
    """Answer with the data once."""
    await exchange.respond(msgspec.json.encode(services.board.snapshot()))


async def status_events(exchange: Exchange, services: Services) -> None:
    """Answer with the data over and over, an event each; raises ApiError 429 for one too many."""
    board, settings = services.board, services.settings
    if board.watchers >= settings.watchers_max:
        raise ApiError(
            429,
            "too_many_watchers",
            f"{board.watchers} pages follow already",
            retry_s=settings.retry_after_s,
        )

    async def produce(events: EventStream) -> None:
        board.watchers += 1
        try:
            while not board.stopping:
                await events.write(data_event(msgspec.json.encode(board.snapshot())))
                await anyio.sleep(settings.watch_s)
        finally:
            board.watchers -= 1

    await exchange.stream(produce)
