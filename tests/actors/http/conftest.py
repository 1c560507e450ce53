"""A whole server over fake models: real pool, real sockets, both backends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from millpond.actors.http.answering import Services
from millpond.actors.http.front import Front
from millpond.actors.http.listening import Server, bound_socket
from millpond.actors.http.routes import make_app, make_services
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.catalogue import Catalogue
from millpond.runtime.errors import MillpondError
from millpond.runtime.pool import PoolSettings, open_pool
from millpond.runtime.testing.fake_served import FakeServed


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Models:
    """What an opener gives: the fake of each name; ``failing`` names raise."""

    fakes: dict[str, FakeServed] = field(default_factory=dict)
    failing: dict[str, MillpondError | Exception] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    gates: dict[str, anyio.Event] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[FakeServed]:
        name = Path(path).stem
        self.opened.append(name)
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.failing:
            raise self.failing[name]
        try:
            yield self.fakes.setdefault(name, FakeServed())
        finally:
            self.closed.append(name)


@dataclass
class Running:
    """A server that listens."""

    url: str
    port: int
    services: Services
    front: Front
    server: Server
    models: Models
    stopping: anyio.Event
    client: httpx.AsyncClient

    @property
    def fake(self) -> FakeServed:
        return self.models.fakes.setdefault("tiny", FakeServed())

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **more)


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a server; names are the models there are."""

    @asynccontextmanager
    async def started(
        names: tuple[str, ...] = ("tiny",),
        pool: PoolSettings | None = None,
        drain_s: float = 5.0,
        **http: Any,
    ) -> AsyncIterator[Running]:
        for name in names:
            (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
        catalogue = Catalogue([(name, str(tmp_path / f"{name}.gguf")) for name in names])
        models, stopping = Models(), anyio.Event()
        settings = HttpSettings(**http)
        with bound_socket("127.0.0.1", 0) as listening:
            async with open_pool(
                catalogue, pool or PoolSettings(), models.open, lambda path: 1
            ) as opened:
                services = make_services(opened, settings)
                front = make_app(services)
                server = Server(front, settings)
                port = listening.getsockname()[1]
                url = f"http://127.0.0.1:{port}"
                async with anyio.create_task_group() as group:
                    group.start_soon(server.serve, listening, stopping, drain_s)
                    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                        yield Running(url, port, services, front, server, models, stopping, client)
                    stopping.set()

    return started
