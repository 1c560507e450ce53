"""``FakeServed``: a ServedModel without an engine, for tests of whatever serves one."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from anyio import Event
from anyio.lowlevel import checkpoint
from millpond.codecs.choices import TokenLogprob
from millpond.codecs.messages import RestoreReport
from millpond.runtime.chat import ChatOptions
from millpond.runtime.chat_messages import checked_messages
from millpond.runtime.errors import ContextExceeded, EmptyPrompt, MillpondError, QueueFull
from millpond.runtime.results import Completion, StreamedToken, Timings, Usage
from millpond.runtime.served import Ask, ModelFigures

BLOCK_TOKENS = 16
END = 256
CONTROL = {257: "<|tool_call>", 258: "<tool_call|>", 259: '<|"|>'}


@dataclass(slots=True)
class FakeServed:
    """Ids are bytes; the continuation is letters that a hash of the prompt chooses.

    script     prompt → ids of the whole completion, in place of letters
    pace       awaited before each token, given its index; a gate for tests
    cached     block-aligned prompts seen before, so a second call hits
    """

    context_tokens: int = 4096
    end_ids: frozenset[int] = frozenset({END})
    template: str = "tools <|tool_call> tool_responses"
    can_pin: bool = False
    can_guide: bool = True
    fingerprint: str = "ab" * 32
    requests_max: int = 1000
    script: Callable[[Sequence[int]], Sequence[int]] | None = None
    pace: Callable[[int], object] | None = None
    error: MillpondError | None = None
    problem: str = ""
    asks: list[Ask] = field(default_factory=list)
    live: int = 0
    cancelled: int = 0
    tokens_given: int = 0
    seen: set[bytes] = field(default_factory=set)

    @asynccontextmanager
    async def stream(self, ask: Ask) -> AsyncIterator[tuple[FakeReading, ...]]:
        """Submit; raises EmptyPrompt, ContextExceeded, QueueFull."""
        await checkpoint()
        ids = await self.encode(ask.prompt, True) if isinstance(ask.prompt, str) else ask.prompt
        if not ids:
            raise EmptyPrompt("prompt: found no token, expected at least one")
        if len(ids) >= self.context_tokens:
            raise ContextExceeded(
                f"prompt: found {len(ids)} tokens, expected at most {self.context_tokens - 1}"
            )
        if self.live >= self.requests_max:
            raise QueueFull(f"found {self.live} requests in the house")
        self.asks.append(ask)
        self.live += ask.n
        readings = tuple(FakeReading(self, ids, ask, choice) for choice in range(ask.n))
        try:
            yield readings
        finally:
            self.live -= ask.n
            self.cancelled += sum(not one.ended for one in readings)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> list[int]:
        """Return the bytes of a plain rendering."""
        await checkpoint()
        checked = checked_messages(messages)
        text = "".join(f"{one['role']}: {one['content']}\n" for one in checked)
        return list((f"{len(options.tools)}|{text}").encode())

    async def encode(self, text: str, with_bos: bool) -> list[int]:
        """Return the bytes."""
        await checkpoint()
        return list(text.encode())

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of bytes."""
        await checkpoint()
        return bytes(one for one in token_ids if one < END).decode(errors="replace")

    def special_text(self, token_id: int) -> str:
        """Return the name of a control token."""
        return CONTROL.get(token_id, "")

    def special_id(self, text: str) -> int | None:
        """Return the id of a control token."""
        return next((found for found, name in CONTROL.items() if name == text), None)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text."""
        return bytes([token_id]) if token_id < END else b""

    def figures(self) -> ModelFigures:
        """Return what goes on."""
        return ModelFigures(live=self.live, running=self.live, problem=self.problem)

    def completion_of(self, ids: Sequence[int], ask: Ask, choice: int) -> list[int]:
        """Return the ids that answer a prompt."""
        if self.script is not None:
            return list(self.script(ids))
        drawn = (ask.sampling.seed, choice) if ask.sampling.temperature else ()
        seed = repr((list(ids), drawn)).encode()
        count = min(ask.sampling.max_tokens, self.context_tokens - len(ids))
        letters = hashlib.shake_256(seed).digest(count)
        return [ord("a") + one % 26 for one in letters]


class FakeReading:
    """The reader's end."""

    def __init__(self, model: FakeServed, ids: Sequence[int], ask: Ask, choice: int) -> None:
        self._model, self._ids, self._ask = model, ids, ask
        self._all = model.completion_of(ids, ask, choice)[: ask.sampling.max_tokens]
        self._given: list[int] = []
        self._text = ""
        self.ended = False

    def __aiter__(self) -> FakeReading:
        return self

    async def __anext__(self) -> StreamedToken:
        """Return the next token."""
        await checkpoint()
        model, index = self._model, len(self._given)
        if model.pace is not None:
            gate = model.pace(index)
            if isinstance(gate, Event):
                await gate.wait()
        if model.error is not None:
            raise model.error
        if index == len(self._all):
            raise StopAsyncIteration
        token_id = self._all[index]
        self._given.append(token_id)
        model.tokens_given += 1
        text = chr(token_id) if token_id < END else ""
        self._text += text
        found = None
        if self._ask.sampling.logprobs is not None:
            top = tuple((one, -1.0 - one) for one in range(self._ask.sampling.logprobs))
            found = TokenLogprob(logprob=-0.5, top=top)
        return StreamedToken(token_id=token_id, text=text, index=index, logprob=found)

    async def result(self) -> Completion:
        """Return the completion."""
        await checkpoint()
        self.ended = True
        cached = 0
        data = bytes(min(one, 255) for one in self._ids)
        for end in range(BLOCK_TOKENS, len(data), BLOCK_TOKENS):
            if data[:end] in self._model.seen:
                cached = end
            self._model.seen.add(data[:end])
        stopped = bool(self._given) and self._given[-1] in self._model.end_ids
        return Completion(
            text=self._text,
            token_ids=tuple(self._given),
            finish_reason="stop" if stopped else "length",
            usage=Usage(
                prompt_tokens=len(self._ids),
                cached_tokens=cached,
                completion_tokens=len(self._given),
            ),
            timings=Timings(ttft_ms=1.0, restore_ms=0.5, prefill_ms=0.25, decode_ms=2.0),
            restore=RestoreReport(misses={} if cached else {"absent": 1}),
        )
