"""``POST /v1/messages``: Anthropic's form of a chat, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millpond.actors.http import forms
from millpond.actors.http.answering import Job, Services, answer
from millpond.actors.http.bodies import CountBody, MessagesBody
from millpond.actors.http.body_reading import read_as
from millpond.actors.http.chat import turn_reader
from millpond.actors.http.chat_input import messages_for
from millpond.actors.http.exchange import Exchange, data_event
from millpond.actors.http.forced_calls import anthropic_tool_choice_of, call_grammar
from millpond.actors.http.formats import anthropic_schema_of
from millpond.actors.http.generation import Choice
from millpond.actors.http.messages_input import openai_messages, openai_tools
from millpond.actors.http.problems import unsupported
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.sampling import ask_of, checked_sampling, pin_of
from millpond.actors.http.turns import Segment, TurnReader, knows_tools
from millpond.runtime.chat import ChatOptions
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import ServedModel


async def messages(exchange: Exchange, services: Services) -> None:
    """Answer; raises as ``answering.answer`` does."""
    body = await read_as(exchange, MessagesBody, services.readers)
    choice = anthropic_tool_choice_of(body.tool_choice)
    tools = openai_tools(body.tools, choice, services.settings.tools_max)
    found = openai_messages(body.system, body.messages)
    schema = anthropic_schema_of(body.output_format, body.output_config, bool(tools))
    fields: dict[str, Any] = {
        "json_schema": schema,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": tuple(body.stop_sequences),
    }
    checked_sampling(fields)  # before a model is loaded for it

    async def prepare(model: ServedModel) -> tuple[Sequence[Choice], MessageAnswer]:
        if schema and not model.can_guide:
            raise unsupported("output_format", "it needs the schema extra, not installed here")
        grammar = await call_grammar(model, tools, choice, services.readers)
        ids = await _ids_of(model, found, tools)
        ask = ask_of(body, ids, checked_sampling(fields | {"grammar": grammar}))
        form = MessageAnswer(
            exchange.record.model, len(ids), turn_reader(model, bool(tools)), model.end_ids
        )
        return [Choice(0, ask)], form

    await answer(
        exchange, services, Job(body.model, body.stream, pin_of(body) is not None, prepare)
    )


async def count_tokens(exchange: Exchange, services: Services) -> None:
    """Answer with the count of a chat's tokens."""
    body = await read_as(exchange, CountBody, services.readers)
    choice = anthropic_tool_choice_of(body.tool_choice)
    tools = openai_tools(body.tools, choice, services.settings.tools_max)
    found = openai_messages(body.system, body.messages)
    exchange.record.model = await services.pool.resolve(body.model)
    counts: list[int] = []

    async def work() -> None:
        async with services.pool.acquire(exchange.record.model) as model:
            counts.append(len(await _ids_of(model, found, tools)))

    await exchange.run_connected(work)
    await exchange.respond(msgspec.json.encode({"input_tokens": counts[0]}))


async def _ids_of(
    model: ServedModel, found: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[int]:
    if tools and not knows_tools(model.template):
        raise unsupported("tools", "the chat template of this model has no tools")
    return await model.encode_chat(messages_for(model.template, found), ChatOptions(tools=tools))


class MessageAnswer:
    """The answer in Anthropic's form: blocks of thinking, text and tool use in a row."""

    def __init__(
        self, model: str, prompt_tokens: int, reader: TurnReader, end_ids: frozenset[int]
    ) -> None:
        self._id, self._model, self._prompt_tokens = forms.new_id("msg"), model, prompt_tokens
        self._reader, self._end_ids = reader, end_ids
        # mutable state, changed only in token and done
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._started = False
        self._reason: tuple[str, str | None] = ("end_turn", None)

    def token(self, choice: Choice, token: StreamedToken) -> bytes:
        """Return the events of what a token made known."""
        return self._start() + b"".join(map(self._take, self._reader.push(token)))

    def done(self, choice: Choice, completion: Completion) -> bytes:
        """Return the events of what was held back, and the end of the last block."""
        data = self._start() + b"".join(map(self._take, self._reader.finish()))
        self._reason = self._reason_of(choice, completion)
        return data + self._close()

    def ending(self, record: RequestRecord) -> bytes:
        """Return the end of the stream; only here the counts are known."""
        reason, stop = self._reason
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(record)}
        return _event(last) + _event({"type": "message_stop"})

    def whole(self, record: RequestRecord) -> bytes:
        """Return the whole answer."""
        reason, stop = self._reason
        return msgspec.json.encode(
            self._message(_usage(record))
            | {"content": self._blocks, "stop_reason": reason, "stop_sequence": stop}
        )

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        # how many of them are cached is known at the end only
        counts = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return _event({"type": "message_start", "message": self._message(counts)})

    def _take(self, segment: Segment) -> bytes:
        data = b""
        kind = {"content": "text", "reasoning": "thinking", "call": "tool_use"}[segment.kind]
        if not self._open or self._blocks[-1]["type"] != kind or kind == "tool_use":
            data = self._close() + self._open_block(kind, segment)
        delta: dict[str, Any] = {"type": "input_json_delta", "partial_json": segment.text}
        if kind != "tool_use":
            self._blocks[-1][kind] += segment.text
            delta = {"type": f"{kind}_delta", kind: segment.text}
        return data + _event(
            {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        )

    def _open_block(self, kind: str, segment: Segment) -> bytes:
        self._open = True
        block: dict[str, Any] = {"type": kind}
        match kind:
            case "tool_use":
                block |= {"id": forms.new_id("toolu"), "name": segment.name, "input": {}}
            case "thinking":
                block |= {"thinking": "", "signature": ""}
            case _:
                block["text"] = ""
        start = {"type": "content_block_start", "index": len(self._blocks), "content_block": block}
        data = _event(start)
        if kind == "tool_use":
            block = block | {"input": msgspec.json.decode(segment.text)}
        self._blocks.append(block)
        return data

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        return _event({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _reason_of(self, choice: Choice, completion: Completion) -> tuple[str, str | None]:
        if completion.finish_reason == "length":
            return ("max_tokens", None)
        if self._reader.calls:
            return ("tool_use", None)
        stops = choice.ask.sampling.stop
        ended = completion.token_ids[-1:] and completion.token_ids[-1] in self._end_ids
        if stops and not ended:
            # which of several it was is not told: only one that stands alone is certain
            return ("stop_sequence", stops[0] if len(stops) == 1 else None)
        return ("end_turn", None)


def _usage(record: RequestRecord) -> dict[str, Any]:
    """Anthropic counts cached tokens beside, not within, ``input_tokens``."""
    return {
        "input_tokens": record.prompt_tokens - record.cached_tokens,
        "cache_read_input_tokens": record.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": record.completion_tokens,
    }


def _event(found: dict[str, Any]) -> bytes:
    return data_event(msgspec.json.encode(found), found["type"])
