"""``/admin``: models in and out, and what lies in the spill root."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.bodies import LoadBody
from millpond.actors.http.body_reading import read_as
from millpond.actors.http.exchange import Exchange


async def load_model(exchange: Exchange, services: Services) -> None:
    """Load a model and wait for it; raises as ``ModelPool.acquire`` does."""
    body = await read_as(exchange, LoadBody, services.readers)
    name = exchange.record.model = await services.pool.resolve(body.model)

    async def work() -> None:
        await services.pool.preload(name)
        if body.keep_alive is not None:
            services.pool.keep(name, body.keep_alive)

    await exchange.run_connected(work)
    await exchange.respond(msgspec.json.encode({"model": name, "loaded": True}))


async def unload_model(exchange: Exchange, services: Services) -> None:
    """Let a model's requests finish, close it, and wait for that."""
    body = await read_as(exchange, LoadBody, services.readers)
    name = exchange.record.model = await services.pool.resolve(body.model)
    found: list[bool] = []

    async def work() -> None:
        found.append(await services.pool.unload(name))

    await exchange.run_connected(work)
    answer = {"model": name, "loaded": False, "was_loaded": found[0]}
    await exchange.respond(msgspec.json.encode(answer))


async def cache_figures(exchange: Exchange, services: Services) -> None:
    """Answer with the figures of the spill root and of each model's use of it."""
    totals = services.pool.totals()
    roots = [one.root for one in totals.values() if one.root is not None]
    body = {
        "root": asdict(roots[-1]) if roots else None,
        "models": {
            name: {
                "spilled_blocks": one.spilled_blocks,
                "spilled_bytes": one.spilled_bytes,
                "refused": one.refused,
                "pins": one.pins,
                "pins_refused": one.pins_refused,
                "restored_blocks": one.restored_blocks,
                "restored_bytes": one.restored_bytes,
                "misses": dict(one.misses),
                "problem": one.spill_problem,
            }
            for name, one in totals.items()
        },
    }
    await exchange.respond(msgspec.json.encode(body))
