"""``/health`` and ``/metrics``: whether the server works, and its figures."""

from __future__ import annotations

import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.metrics import CONTENT_TYPE


async def live(exchange: Exchange, services: Services) -> None:
    """200 while the event loop answers at all."""
    await exchange.respond(msgspec.json.encode({"live": True}))


async def ready(exchange: Exchange, services: Services) -> None:
    """200 while requests are taken, else 503 with the reasons."""
    await health(exchange, services)


async def health(exchange: Exchange, services: Services) -> None:
    """200 while requests are taken, else 503; ``reasons`` say what is wrong in either case.

    A model whose engine failed makes the server unready until its house is closed; a cache that
    cannot be written makes it ``degraded`` only; arithmetic that is slow is told and no more.
    """
    broken: list[str] = []
    weak: list[str] = []
    slow: list[str] = []
    if services.board.stopping:
        broken.append("the server is stopping")
    for name, model in services.pool.loaded().items():
        figures = model.figures()
        if figures.problem:
            broken.append(f"{name}: {figures.problem}")
        if figures.spill_problem:
            weak.append(f"{name}: spilling is off: {figures.spill_problem}")
        if figures.compute_problem:
            slow.append(f"{name}: {figures.compute_problem}")
    status = "failed" if broken else "degraded" if weak else "ok"
    body = {
        "status": status,
        "live": True,
        "ready": not broken,
        "reasons": [*broken, *weak, *slow],
        "models": sorted(services.pool.loaded()),
    }
    await exchange.respond(msgspec.json.encode(body), status=503 if broken else 200)


async def metrics(exchange: Exchange, services: Services) -> None:
    """All metrics in Prometheus' text form."""
    headers = [(b"content-type", CONTENT_TYPE)]
    await exchange.respond(services.board.metrics.text(), headers=headers)
