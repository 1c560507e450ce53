"""Anthropic's form of a chat, with the official client where it is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "x" * 40}],
}
TOOLS = [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}]


def call_ids() -> list[int]:
    return [*b"hm", 257, *b"call:weather{city:", 259, *b"Oslo", 259, *b"}", 258, 256]


async def test_the_official_client_reads_and_streams(start: Any) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the official client is not installed")
    async with (
        start(api_key="secret") as running,
        anthropic.AsyncAnthropic(base_url=running.url, api_key="secret") as client,
    ):
        whole = await client.messages.create(**ASK)
        assert whole.stop_reason == "max_tokens" and len(whole.content[0].text) == 6
        assert whole.usage.cache_read_input_tokens == 0
        async with client.messages.stream(**ASK) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert final.usage.cache_read_input_tokens == 48
        assert final.usage.input_tokens + 48 == whole.usage.input_tokens
        counted = await client.messages.count_tokens(model="tiny", messages=ASK["messages"])
        assert counted.input_tokens == whole.usage.input_tokens


async def test_tool_use_is_a_block_and_its_result_comes_back(start: Any) -> None:
    async with start() as running:
        running.fake.script = lambda prompt: call_ids()
        body = ASK | {"max_tokens": 100, "tools": TOOLS, "tool_choice": {"type": "auto"}}
        found = (await running.post("/v1/messages", body)).json()
        assert found["stop_reason"] == "tool_use"
        text, use = found["content"]
        assert text == {"type": "text", "text": "hm"}
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"city": "Oslo"})
        response = await running.post("/v1/messages", body | {"stream": True})
        events = [
            json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")
        ]
        assert [one["type"] for one in events] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert json.loads(events[6]["delta"]["partial_json"]) == {"city": "Oslo"}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
        chat = [*ASK["messages"], {"role": "assistant", "content": found["content"]}]
        chat.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
        assert (await running.post("/v1/messages", body | {"messages": chat})).status_code == 200


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_tool_use_can_be_asked_for(start: Any, choice: dict[str, str]) -> None:
    async with start() as running:
        body = ASK | {"max_tokens": 100, "tools": TOOLS, "tool_choice": choice}
        assert (await running.post("/v1/messages", body)).status_code == 200
        assert "call:weather" in running.fake.asks[0].sampling.grammar


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "nothing"}]}]}, 400, None),
        ({"messages": [{"role": "user", "content": 3}]}, 400, None),
        ({"messages": [{"role": "boss", "content": ""}]}, 400, None),
        ({"system": [{"type": "text"}]}, 400, None),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, None),
        ({"tool_choice": {"type": "any"}}, 400, None),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, 400, None),
        ({"tools": TOOLS, "tool_choice": {"type": "must"}}, 400, None),
        ({"bananas": 1}, 400, None),
    ],
)
async def test_errors_have_anthropics_form(
    start: Any, change: dict[str, Any], status: int, kind: str | None
) -> None:
    async with start() as running:
        response = await running.post("/v1/messages", ASK | change)
        found = response.json()
        assert response.status_code == status and found["type"] == "error"
        assert found["error"]["type"] == (kind or "invalid_request_error")


async def test_a_stop_sequence_is_told(start: Any) -> None:
    async with start() as running:
        running.fake.script = lambda prompt: list(b"abc")
        body = ASK | {"stop_sequences": ["zz"], "max_tokens": 3}
        assert (await running.post("/v1/messages", body)).json()["stop_reason"] == "max_tokens"
