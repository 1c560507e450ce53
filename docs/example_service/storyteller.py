"""Storyteller: a small web service with a millpond runtime inside.

POST /stories   {"prompt": "Once upon"} → the story as plain text, piece by piece as it is told
GET  /health    200 while stories are told, else 503 and the reason
GET  /figures   stories told, and how many tokens of prompts the cache saved
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from anyio import CancelScope, create_task_group
from millpond.runtime import Runtime, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.errors import EngineError, MillpondError, QueueFull, RequestError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

_log = logging.getLogger(__name__)
STORY = SamplingParams(max_tokens=200)
PROMPT_BYTES_MAX = 64 * 1024
PLAIN_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
Opener = Callable[[RuntimeConfig], AbstractAsyncContextManager[Runtime]]


@dataclass(slots=True)
class Figures:
    """What was done so far."""

    stories: int = 0
    cached_tokens: int = 0


def make_app(config: RuntimeConfig, opener: Opener = open_runtime) -> Starlette:
    """Return the application; its lifespan opens the runtime.

    opener  ``open_runtime``, or what a test puts in its place
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with opener(config) as runtime:
            yield {"runtime": runtime, "figures": Figures()}

    routes = [
        Route("/stories", Stories(), methods=["POST"]),
        Route("/health", health),
        Route("/figures", figures),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def from_environment() -> Starlette:
    """For a server: ``STORY_MODEL=gemma.gguf hypercorn 'storyteller:from_environment()'``."""
    return make_app(RuntimeConfig(model=os.environ["STORY_MODEL"]))


class Stories:
    """An ASGI endpoint, since it must hear of a visitor who leaves while a story is told."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            prompt = await _prompt_of(request)
            async with request.state.runtime.stream(prompt, STORY) as tokens:
                telling = Telling(tokens, send, request.state.figures)
                async with create_task_group() as group:
                    group.start_soon(_leave_with_visitor, receive, group.cancel_scope)
                    await telling.run()
                    group.cancel_scope.cancel()
        except QueueFull:
            await _refusal(503, "too many stories at once", retry_after="1")(scope, receive, send)
        except RequestError as error:
            await _refusal(400, str(error))(scope, receive, send)
        except EngineError as error:
            await _refusal(503, str(error))(scope, receive, send)


class Telling:
    """One story on its way to its visitor."""

    def __init__(self, tokens: Any, send: Send, counts: Figures) -> None:
        self._tokens, self._send, self._figures = tokens, send, counts

    async def run(self) -> None:
        """Tell it; one that fails is cut off, and the server closes the connection."""
        await self._send({"type": "http.response.start", "status": 200, "headers": PLAIN_TEXT})
        try:
            async for token in self._tokens:
                await self._send(_piece(token.text, more=True))
            done = await self._tokens.result()
        except MillpondError as error:
            _log.warning("a story was cut off: %s", error)
            return
        await self._send(_piece("", more=False))
        self._figures.stories += 1
        self._figures.cached_tokens += done.usage.cached_tokens


async def _leave_with_visitor(receive: Receive, scope: CancelScope) -> None:
    """Cancel the story once the visitor is gone: nobody reads it any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def health(request: Request) -> JSONResponse:
    """Answer with what works."""
    found = request.state.runtime.health()
    body = {"problem": found.problem, "spill_problem": found.spill_problem}
    return JSONResponse(body, 200 if found.is_serving else 503)


async def figures(request: Request) -> JSONResponse:
    """Answer with the figures."""
    found: Figures = request.state.figures
    return JSONResponse({"stories": found.stories, "cached_tokens": found.cached_tokens})


async def _prompt_of(request: Request) -> str:
    """Return the prompt of a body; raises RequestError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > PROMPT_BYTES_MAX:
            raise RequestError(f"found more than {PROMPT_BYTES_MAX} bytes")
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise RequestError('expected {"prompt": "a text"}')
    return prompt


def _refusal(status: int, reason: str, retry_after: str = "") -> JSONResponse:
    headers = {"retry-after": retry_after} if retry_after else {}
    return JSONResponse({"error": reason}, status, headers)


def _piece(text: str, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}
