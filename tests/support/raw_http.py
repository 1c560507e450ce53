"""Raw HTTP over a socket, for tests of servers: what a client may send and when it may go."""

from __future__ import annotations

import json
from typing import Any

import anyio
from anyio.abc import SocketStream

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


async def connected(running: Any) -> SocketStream:
    return await anyio.connect_tcp("127.0.0.1", running.port)


def request(path: str, body: Any = None, **headers: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None and "content_length" not in headers:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def read_until(stream: SocketStream, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        data += await stream.receive()
    return data


async def read_all(stream: SocketStream) -> bytes:
    data = b""
    try:
        while True:
            data += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return data


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


class Gate:
    """Lets a number of tokens pass, then none until it is opened."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.event, self.reached = tokens, anyio.Event(), anyio.Event()

    def __call__(self, index: int) -> anyio.Event | None:
        if index < self.tokens:
            return None
        self.reached.set()
        return self.event
