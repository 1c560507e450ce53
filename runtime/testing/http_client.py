"""A raw HTTP/1.1 client for soaks: one request a connection, nothing forgiven, nothing retried."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import SocketStream
from millpond.runtime.testing.serve_process import ServeProcess

SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


async def get(port: int, path: str) -> Answer:
    """Ask with GET; raises as ``ask`` does."""
    return await _exchange(port, _head("GET", path, None), 0.0)


async def ask(port: int, path: str, body: bytes, pause_s: float = 0.0) -> Answer:
    """Ask with POST; ``pause_s`` passes before each read.

    Raises OSError, EndOfStream or BrokenResourceError if the connection broke before the end.
    """
    return await _exchange(port, _head("POST", path, body) + body, pause_s)


async def hang_up(port: int, path: str, body: bytes, wait_s: float) -> None:
    """Ask, wait, and close the connection, whatever came."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(_head("POST", path, body) + body)
        with anyio.move_on_after(wait_s):
            while True:
                await stream.receive()


def _head(method: str, path: str, body: bytes | None) -> bytes:
    length = "" if body is None else f"content-length: {len(body)}\r\n"
    return (
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n{length}\r\n".encode()
    )


async def _exchange(port: int, data: bytes, pause_s: float) -> Answer:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(data)
        found = await _all(stream, pause_s)
    head, mark, body = found.partition(b"\r\n\r\n")
    if not mark:
        raise anyio.EndOfStream
    lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines[1:]]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    elif len(body) != int(headers.get("content-length", 0)):
        raise anyio.EndOfStream
    return Answer(int(lines[0].split()[1]), headers, body)


async def _all(stream: SocketStream, pause_s: float) -> bytes:
    parts = []
    try:
        while True:
            if pause_s:
                await anyio.sleep(pause_s)
            parts.append(await stream.receive())
    except anyio.EndOfStream:
        return b"".join(parts)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the parts of a chunked body; raises EndOfStream if its end is missing."""
    while True:
        size, mark, rest = data.partition(b"\r\n")
        length = int(size, 16) if mark else -1
        if length < 0 or len(rest) < length + 2:
            raise anyio.EndOfStream
        if length == 0:
            return
        yield rest[:length]
        data = rest[length + 2 :]


# -- what an answer says


def text_of(path: str, answer: Answer) -> str:
    """Return the texts of all choices of an answer, streamed or not, in order."""
    texts: dict[int, str] = {}
    for part in _parts(answer):
        for index, text in _pieces(path, part):
            texts[index] = texts.get(index, "") + text
    return "\n".join(texts[index] for index in sorted(texts))


def _parts(answer: Answer) -> Iterator[dict[str, Any]]:
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        yield json.loads(answer.body)
        return
    for line in answer.body.decode().split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _pieces(path: str, part: dict[str, Any]) -> Iterator[tuple[int, str]]:
    if "error" in part:
        raise AssertionError(f"{path}: an error within an answer: {part['error']}")
    if path == "/v1/messages":
        blocks = part.get("content") or [part.get("delta") or {}]
        yield 0, "".join(block.get("text") or "" for block in blocks)
        return
    for choice in part.get("choices", ()):
        said = choice.get("message") or choice.get("delta") or choice
        yield choice["index"], said.get("content") or said.get("text") or ""


async def left_in(process: ServeProcess, files: int) -> dict[str, int]:
    """Wait until no request is left in a server, at most SETTLE_S; return what still is.

    files  its open descriptors before any client came

    What is left then is told on stderr, with all figures of the server.
    """
    until_s = anyio.current_time() + SETTLE_S
    while True:
        data = json.loads((await get(process.port, "/status.json")).body)
        models = list(data["models"].values())
        found = {
            "live": data["live_count"],
            "users": data["pool"]["users"],
            "waiting": data["pool"]["waiting"],
            "house_live": sum(one["live"] for one in models),
            "slots_lent": sum(one["slots_lent"] for one in models),
            "slots_lost": sum(one["slots_lost"] for one in models),
            "files": max(0, process.open_files() - files),
        }
        if not any(found.values()):
            return found
        if anyio.current_time() > until_s:
            shown = {name: data[name] for name in ("live", "pool", "models")}
            print(json.dumps(shown), file=sys.stderr)
            return found
        await anyio.sleep(0.5)
