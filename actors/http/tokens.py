"""``POST /tokenize`` and ``/detokenize``: text to ids and back."""

from __future__ import annotations

import msgspec
from millpond.actors.http.answering import Services
from millpond.actors.http.bodies import DetokenizeBody, TokenizeBody
from millpond.actors.http.body_reading import read_as
from millpond.actors.http.chat_input import checked_tools, messages_for
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.problems import invalid
from millpond.runtime.chat import ChatOptions
from millpond.runtime.served import ServedModel


async def tokenize(exchange: Exchange, services: Services) -> None:
    """Answer with ids, their count and the model's context; raises ApiError and MillpondError."""
    body = await read_as(exchange, TokenizeBody, services.readers)
    tools = checked_tools(body.tools, services.settings.tools_max)
    given = [one for one in (body.prompt, body.content, body.messages) if one is not None]
    if len(given) != 1:
        raise invalid("prompt", "expected exactly one of prompt, content and messages")
    exchange.record.model = await services.pool.resolve(body.model)
    answers: list[bytes] = []

    async def ids_of(model: ServedModel) -> list[int]:
        if body.messages is None:
            return await model.encode(body.prompt or body.content or "", body.add_special_tokens)
        options = ChatOptions(tools=tools, add_generation_prompt=body.add_generation_prompt)
        return await model.encode_chat(messages_for(model.template, body.messages), options)

    async def work() -> None:
        async with services.pool.acquire(exchange.record.model) as model:
            ids = await ids_of(model)
            found = {"tokens": ids, "count": len(ids), "max_model_len": model.context_tokens}
            answers.append(msgspec.json.encode(found))

    await exchange.run_connected(work)
    await exchange.respond(answers[0])


async def detokenize(exchange: Exchange, services: Services) -> None:
    """Answer with the text of ids, under both names that servers give it."""
    body = await read_as(exchange, DetokenizeBody, services.readers)
    limit = services.settings.token_ids_max
    if len(body.tokens) > limit:
        raise invalid("tokens", f"tokens: found {len(body.tokens)}, expected at most {limit}")
    exchange.record.model = await services.pool.resolve(body.model)
    texts: list[str] = []

    async def work() -> None:
        async with services.pool.acquire(exchange.record.model) as model:
            texts.append(await model.decode(body.tokens))

    await exchange.run_connected(work)
    await exchange.respond(msgspec.json.encode({"content": texts[0], "prompt": texts[0]}))
