"""A web server without a network: it calls an application as servers do, for tests.

Leaving ``serving`` shuts the application down; requests that still run are the application's to
end, as with a real server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import Event, create_task_group
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.types import Message


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[Server]:
    """Run the application's lifespan; visitors come by the server that this gives."""
    async with create_task_group() as connections, app.router.lifespan_context(app) as state:
        yield Server(app, connections, dict(state or {}))


class Server:
    """Accepts visitors."""

    def __init__(self, app: Starlette, connections: TaskGroup, state: dict[str, Any]) -> None:
        self._app, self._connections, self._state = app, connections, state

    def post(self, path: str, body: object) -> Visitor:
        """Send a request; what comes back is read by the visitor."""
        return self._visit("POST", path, json.dumps(body).encode())

    def get(self, path: str) -> Visitor:
        """Send a request without a body."""
        return self._visit("GET", path, b"")

    def _visit(self, method: str, path: str, body: bytes) -> Visitor:
        visitor = Visitor(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
            "client": ("visitor", 1),
            "server": ("test", 80),
            "state": dict(self._state),
        }
        self._connections.start_soon(visitor.run, self._app, scope)
        return visitor


class Visitor:
    """One client and its request.

    status, text  of the response so far; status 0 before it began
    is_whole      True once the response came to its end
    """

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status, self.text, self.is_whole = 0, "", False
        self._gone, self._changed = Event(), Event()
        self._ended = False

    async def run(self, app: Starlette, scope: dict[str, Any]) -> None:
        """Be served."""
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._ended = True
            self._change()

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def read(self, letters: int) -> str:
        """Return the text once so much of it came, or the response ended."""
        while len(self.text) < letters and not self._ended:
            await self._changed.wait()
        return self.text

    async def read_all(self) -> str:
        """Return the text once the application is done."""
        while not self._ended:
            await self._changed.wait()
        return self.text

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return  # as servers do: nobody is told
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.text += message.get("body", b"").decode()
            self.is_whole = not message.get("more_body", False)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = Event()
