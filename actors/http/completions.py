"""``POST /v1/completions``: texts or token ids, continued."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from millpond.actors.http import forms
from millpond.actors.http.answering import Job, Services, answer
from millpond.actors.http.bodies import CompletionBody
from millpond.actors.http.body_reading import read_as
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.generation import Choice
from millpond.actors.http.logprobs import Logprobs
from millpond.actors.http.problems import invalid
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.sampling import ask_of, pin_of, sampling_of
from millpond.runtime.results import Completion, StreamedToken
from millpond.runtime.served import ServedModel

MAX_TOKENS_DEFAULT = 16
"""Completion tokens where a request names no number, as OpenAI has it."""


async def completions(exchange: Exchange, services: Services) -> None:
    """Answer; raises as ``answering.answer`` does."""
    body = await read_as(exchange, CompletionBody, services.readers)
    prompts = prompts_of(body.prompt)
    count = len(prompts) * body.n
    limit = services.settings.choices_max
    if count > limit:
        raise invalid("n", f"n: found {count} completions in all, expected at most {limit}")
    sampling = sampling_of(body, MAX_TOKENS_DEFAULT)

    async def prepare(model: ServedModel) -> tuple[Sequence[Choice], CompletionAnswer]:
        choices = [
            Choice(place * body.n + number, ask, number == 0)
            for place, ask in enumerate([ask_of(body, one, sampling) for one in prompts])
            for number in range(body.n)
        ]
        head = forms.AnswerHead(
            forms.new_id("cmpl"), "text_completion", exchange.record.model, model.fingerprint
        )
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return choices, CompletionAnswer(head, with_usage, [Logprobs(model) for _ in choices])

    await answer(
        exchange, services, Job(body.model, body.stream, pin_of(body) is not None, prepare)
    )


def prompts_of(found: str | Sequence[Any]) -> list[str | Sequence[int]]:
    """Return the prompts: texts, or lists or arrays of token ids.  Raises ApiError 400."""
    if isinstance(found, str | array):
        return [found]
    if not found:
        raise invalid("prompt", "prompt: found an empty list, expected at least one prompt")
    ids = [one for one in found if isinstance(one, int)]
    if len(ids) == len(found):
        return [ids]
    if ids:
        raise invalid("prompt", "prompt: found token ids among other prompts")
    return [one for one in found if not isinstance(one, int)]


class CompletionAnswer:
    """The answer in OpenAI's form of text completions."""

    def __init__(
        self, head: forms.AnswerHead, with_usage: bool, logprobs: Sequence[Logprobs]
    ) -> None:
        """Begin it; ``logprobs`` has one gatherer per choice."""
        self._head, self._with_usage = head, with_usage
        # mutable state, changed only in token and done
        self._new = list(logprobs)
        self._choices: dict[int, dict[str, Any]] = {}
        self._gathered: dict[int, dict[str, list[Any]]] = {}

    def token(self, choice: Choice, token: StreamedToken) -> bytes:
        """Return the chunk of a token that has text or a log-probability."""
        self._new[choice.index].add(token)
        logprobs = self._logprobs(choice)
        if not token.text and logprobs is None:
            return b""
        return self._chunk(choice, token.text, logprobs)

    def done(self, choice: Choice, completion: Completion) -> bytes:
        """Return the last chunk of a choice."""
        reason = completion.finish_reason
        self._choices[choice.index] = {
            "index": choice.index,
            "text": completion.text,
            "logprobs": self._gathered.get(choice.index),
            "finish_reason": reason,
        }
        return self._chunk(choice, "", None, reason)

    def ending(self, record: RequestRecord) -> bytes:
        """Return the end of the stream."""
        last = forms.usage_chunk(self._head, record) if self._with_usage else b""
        return last + forms.DONE

    def whole(self, record: RequestRecord) -> bytes:
        """Return the whole answer."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return forms.whole(self._head, choices, record)

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        found = self._new[choice.index].completion()
        if found is not None:
            gathered = self._gathered.setdefault(choice.index, {name: [] for name in found})
            for name, values in found.items():
                gathered[name] += values
        return found

    def _chunk(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, reason: str | None = None
    ) -> bytes:
        found = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return forms.chunk(self._head, found, self._with_usage)
