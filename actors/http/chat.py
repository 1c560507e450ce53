"""``POST /v1/chat/completions``: a chat, continued by one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.actors.http import forms
from millpond.actors.http.answering import Job, Services, answer
from millpond.actors.http.bodies import ChatBody
from millpond.actors.http.body_reading import read_as
from millpond.actors.http.chat_input import checked_tools, messages_for
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.forced_calls import call_grammar, chosen_tools, tool_choice_of
from millpond.actors.http.formats import schema_of
from millpond.actors.http.generation import Choice
from millpond.actors.http.logprobs import Logprobs
from millpond.actors.http.problems import invalid, unsupported
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.sampling import ask_of, pin_of, sampling_of
from millpond.actors.http.turns import Segment, TurnReader, knows_tools, regions_of
from millpond.runtime.chat import ChatOptions
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import ServedModel


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """Answer; raises as ``answering.answer`` does."""
    body = await read_as(exchange, ChatBody, services.readers)
    limit = services.settings.choices_max
    if body.n > limit:
        raise invalid("n", f"n: found {body.n}, expected at most {limit}")
    choice = tool_choice_of(body.tool_choice)
    tools = chosen_tools(checked_tools(body.tools, services.settings.tools_max), choice)
    schema = schema_of(body.response_format, bool(tools))

    async def prepare(model: ServedModel) -> tuple[Sequence[Choice], ChatAnswer]:
        if tools and not knows_tools(model.template):
            raise unsupported("tools", "the chat template of this model has no tools")
        if schema and not model.can_guide:
            raise unsupported("response_format", "it needs the schema extra, not installed here")
        grammar = await call_grammar(model, tools, choice, services.readers)
        ids = await model.encode_chat(
            messages_for(model.template, body.messages),
            ChatOptions(tools=tools, variables=body.chat_template_kwargs),
        )
        ask = ask_of(
            body,
            ids,
            sampling_of(body, body.max_completion_tokens or model.context_tokens, schema, grammar),
        )
        choices = [Choice(index, ask, index == 0) for index in range(body.n)]
        head = forms.AnswerHead(
            forms.new_id("chatcmpl"), "chat.completion", exchange.record.model, model.fingerprint
        )
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        turns = [Turn(turn_reader(model, bool(tools)), Logprobs(model)) for _ in choices]
        return choices, ChatAnswer(head, with_usage, turns)

    await answer(
        exchange, services, Job(body.model, body.stream, pin_of(body) is not None, prepare)
    )


def turn_reader(model: ServedModel, with_tools: bool) -> TurnReader:
    """Return a reader of the model's turn."""
    regions = regions_of(model.template, with_tools)
    bare_json = with_tools and not any(one.kind == "call" for one in regions)
    return TurnReader(regions, model.special_text, bare_json)


class ChatAnswer:
    """The answer in OpenAI's form of chats."""

    def __init__(self, head: forms.AnswerHead, with_usage: bool, turns: Sequence[Turn]) -> None:
        self._head, self._with_usage, self._turns = head, with_usage, turns

    def token(self, choice: Choice, token: StreamedToken) -> bytes:
        """Return the chunks of what a token made known, that of the role before the first."""
        turn = self._turns[choice.index]
        turn.logprobs.add(token)
        return self._opening(choice, turn) + self._segments(choice, turn, turn.reader.push(token))

    def done(self, choice: Choice, completion: Completion) -> bytes:
        """Return the last chunks of a choice."""
        turn = self._turns[choice.index]
        data = self._opening(choice, turn)
        data += self._segments(choice, turn, turn.reader.finish())
        turn.reason = completion.finish_reason
        if turn.reader.calls and turn.reason == "stop":
            turn.reason = "tool_calls"
        return data + self._chunk(choice, {}, (turn.new_logprobs(), turn.reason))

    def ending(self, record: RequestRecord) -> bytes:
        """Return the end of the stream."""
        last = forms.usage_chunk(self._head, record) if self._with_usage else b""
        return last + forms.DONE

    def whole(self, record: RequestRecord) -> bytes:
        """Return the whole answer."""
        choices = [
            {
                "index": index,
                "message": turn.message(),
                "logprobs": turn.all_logprobs(),
                "finish_reason": turn.reason,
            }
            for index, turn in enumerate(self._turns)
        ]
        return forms.whole(self._head, choices, record)

    def _opening(self, choice: Choice, turn: Turn) -> bytes:
        if turn.opened:
            return b""
        turn.opened = True
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def _segments(self, choice: Choice, turn: Turn, segments: Sequence[Segment]) -> bytes:
        """The log-probabilities of all tokens since go with the first chunk."""
        chunks = []
        for segment in segments:
            delta = turn.take(segment)
            chunks.append(self._chunk(choice, delta, (turn.new_logprobs(), None)))
        return b"".join(chunks)

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, Any],
        more: tuple[dict[str, Any] | None, str | None] = (None, None),
    ) -> bytes:
        found = {
            "index": choice.index,
            "delta": delta,
            "logprobs": more[0],
            "finish_reason": more[1],
        }
        return forms.chunk(self._head, found, self._with_usage)


class Turn:
    """One choice: what its reader gave so far, and the log-probabilities of its tokens."""

    def __init__(self, reader: TurnReader, logprobs: Logprobs) -> None:
        self.reader, self.logprobs = reader, logprobs
        # mutable state, changed only by ChatAnswer
        self.opened = False
        self._entries: list[Any] = []
        self.reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def take(self, segment: Segment) -> dict[str, Any]:
        """Keep a segment; return it as a delta."""
        if segment.kind == "content":
            self._content.append(segment.text)
            return {"content": segment.text}
        if segment.kind == "reasoning":
            self._reasoning.append(segment.text)
            return {"reasoning_content": segment.text}
        call = {
            "id": forms.new_id("call"),
            "type": "function",
            "function": {"name": segment.name, "arguments": segment.text},
        }
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}

    def new_logprobs(self) -> dict[str, Any] | None:
        """Return the log-probabilities that were not returned yet."""
        found = self.logprobs.chat()
        if found is not None:
            self._entries += found["content"]
        return found

    def all_logprobs(self) -> dict[str, Any] | None:
        """Return those of the whole turn."""
        return {"content": self._entries, "refusal": None} if self._entries else None

    def message(self) -> dict[str, Any]:
        """Return the whole turn."""
        content = "".join(self._content)
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            found["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            found |= {"content": content or None, "tool_calls": self._calls}
        return found
