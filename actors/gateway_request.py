"""One request as the gateway sees it: text so far, stop strings, and the reader's end of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from anyio import Event
from anyio.lowlevel import checkpoint
from millpond.codecs.choices import TokenLogprob
from millpond.codecs.messages import (
    Finished,
    FinishReason,
    Submit,
    Tokens,
)
from millpond.runtime import errors
from millpond.runtime.errors import EngineDied, EngineError, MillpondError, RequestFailed
from millpond.runtime.results import Completion, StreamedToken, Timings, Usage


class Detokenizer(Protocol):
    """Turns ids into text, one at a time; never gives half a character."""

    def push(self, token_id: int) -> str:
        """Return the text that became whole with this id."""

    def finish(self) -> str:
        """Return what is left, incomplete characters replaced by U+FFFD."""


class GatewayTokenizer(Protocol):
    """What the gateway needs of a tokenizer; ``encode_prompt`` runs on a worker thread."""

    @property
    def vocab_size(self) -> int:
        """Count of ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, BOS added where the model wants it."""

    def detokenizer(self) -> Detokenizer:
        """Return a fresh streaming detokeniser."""


class Request:
    """State of one request; touched on the event loop only.

    A stop string ends the text before it.  Text that may be the beginning of one is held back until
    it is known not to be, so no part of a stop string ever reaches the reader.
    """

    def __init__(
        self,
        submit: Submit,
        detokenizer: Detokenizer,
        clock: Callable[[], float],
        started: float,
    ) -> None:
        self.submit, self.id = submit, submit.request_id
        self._detokenizer, self._clock, self.started = detokenizer, clock, started
        self._stop = submit.sampling.stop
        # mutable state, changed only by the gateway, but for ``ready``, which the reader drains
        self.submitted = self.cancelled = False
        self.expires_s = math.inf  # on the clock; it fails then
        self.ready: deque[StreamedToken] = deque()
        self.token_ids: list[int] = []
        self.digests: list[bytes] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""  # what the reader may see
        self._held = ""  # what may still turn out to be a stop string
        self._stopped = False
        self._first_s: float | None = None
        self.finished: Finished | None = None
        self.error: MillpondError | None = None
        self.changed = Event()

    @property
    def is_over(self) -> bool:
        """True once the engine said Finished."""
        return self.finished is not None

    @property
    def is_closed(self) -> bool:
        """True once the reader gets nothing more."""
        return self._stopped or self.finished is not None or self.error is not None

    def take(self, message: Tokens) -> bool:
        """Add tokens; return True once a stop string was found and the engine may stop."""
        if self._first_s is None:
            self._first_s = self._clock()
        for place, token_id in enumerate(message.token_ids):
            if self.is_closed:
                break
            self.token_ids.append(token_id)
            self.digests.extend(message.logits_xxh3[place : place + 1])
            self.logprobs.extend(message.logprobs[place : place + 1])
            self._add(self._detokenizer.push(token_id), token_id)
        self._notify()
        return self._stopped

    def end(self, message: Finished) -> None:
        """The engine is done with this request."""
        if message.reason == "error" and self.error is None:
            self.error = self._typed(message)
        if not self.is_closed:
            self._flush()
        self.finished = message
        self._notify()

    def fail(self, error: MillpondError) -> None:
        """End the reader's side with an error, unless it has an end already.

        A request that a stop string ended is complete without the engine's report.
        """
        if self._stopped and self.finished is None:
            self.finished = Finished(request_id=self.id, reason="cancelled")
        elif not self.is_closed:
            self.error = error
        self._notify()

    def completion(self) -> Completion:
        """Return the result; raises the request's error, or RequestFailed if it was cut short."""
        if self.error is not None:
            raise self.error
        report = (
            self.finished
            if self.finished is not None
            else Finished(request_id=self.id, reason="stop")
        )
        if report.reason == "cancelled" and not self._stopped:
            raise RequestFailed("the request was cancelled", self.id)
        reason: FinishReason = "stop" if self._stopped else report.reason
        first = self._first_s if self._first_s is not None else self._clock()
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=len(self.submit.token_ids) // 4,
                cached_tokens=report.cached_tokens,
                completion_tokens=len(self.token_ids),
            ),
            timings=Timings(
                ttft_ms=1e3 * (first - self.started),
                restore_ms=report.restored.restore_ms,
                prefill_ms=report.prefill_ms,
                decode_ms=report.decode_ms,
            ),
            restore=report.restored,
            shared_tokens=report.shared_tokens,
            offered=report.offered,
            refused=report.refused,
            logits_xxh3=tuple(self.digests),
            logprobs=tuple(self.logprobs),
        )

    def _add(self, text: str, token_id: int) -> None:
        self._held += text
        cut = min((at for at in map(self._held.find, self._stop) if at >= 0), default=-1)
        if cut >= 0:
            text, self._held, self._stopped = self._held[:cut], "", True
        else:
            keep = _may_begin(self._held, self._stop)
            text, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        self._emit(text, token_id)

    def _flush(self) -> None:
        """No more ids: what was held back is text after all, unless it completes a stop string."""
        self._held += self._detokenizer.finish()
        cut = min((at for at in map(self._held.find, self._stop) if at >= 0), default=-1)
        text, self._held = (self._held if cut < 0 else self._held[:cut]), ""
        self._stopped = self._stopped or cut >= 0
        if text:
            self._emit(text, self.token_ids[-1])

    def _emit(self, text: str, token_id: int) -> None:
        self.text += text
        index = len(self.token_ids) - 1
        logprob = self.logprobs[index] if index < len(self.logprobs) else None
        self.ready.append(StreamedToken(token_id=token_id, text=text, index=index, logprob=logprob))

    def _typed(self, message: Finished) -> MillpondError:
        if message.error_type:
            return engine_error(message.error_type, message.error)
        return RequestFailed(message.error, self.id)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = Event()


def engine_error(error_type: str, text: str) -> EngineError:
    """Return the error that the engine named; EngineDied for a name that is none of ours."""
    kind = getattr(errors, error_type, EngineDied)
    return kind(text) if issubclass(kind, EngineError) else EngineDied(text)


class TokenStream:
    """The reader's end: iterate for tokens, then ask for ``result``.

    leave  cancels the request, for a reader that wants no more of it before its block ends
    """

    def __init__(self, request: Request, leave: Callable[[], None]) -> None:
        self._request, self.leave = request, leave

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> StreamedToken:
        """Return the next token; raises the request's error once all before it was read."""
        await checkpoint()
        request = self._request
        while not request.ready:
            if request.error is not None:
                raise request.error
            if request.is_closed:
                raise StopAsyncIteration
            await request.changed.wait()
        return request.ready.popleft()

    async def result(self) -> Completion:
        """Wait for the engine's report and return the completion, whatever was read of it so far.

        Raises RequestFailed, EngineStalled, EngineDied or RuntimeClosed.
        """
        await checkpoint()
        request = self._request
        while not request.is_over and request.error is None:
            await request.changed.wait()
        return request.completion()


def _may_begin(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest end of ``text`` that begins a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0
