"""OpenAI's routes over real sockets: answers, streams, usage, logprobs, tools, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from millpond.runtime.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineDied,
    KvMemoryExceeded,
    QueueFull,
    RequestFailed,
)

pytestmark = pytest.mark.anyio
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


async def test_a_stream_says_what_the_whole_answer_says(start: Any) -> None:
    async with start() as running:
        whole = (await running.post("/v1/chat/completions", HELLO)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await running.post("/v1/chat/completions", HELLO | options)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events_of(response.text)
        parsed = [json.loads(one) for one in chunks]
        assert done == "[DONE]"
        text = "".join(
            one["choices"][0]["delta"].get("content", "") for one in parsed if one["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"] and len(text) == 8
        assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
        assert parsed[-1]["choices"] == [] and parsed[-1]["usage"]["completion_tokens"] == 8
        assert all(one["usage"] is None for one in parsed[:-1])
        assert parsed[-2]["choices"][0]["finish_reason"] == "length"
        assert len({one["id"] for one in parsed}) == 1


async def test_usage_tells_what_was_cached_and_server_timing_what_it_cost(start: Any) -> None:
    async with start() as running:
        body = HELLO | {"messages": [{"role": "user", "content": "x" * 64}]}
        cold = (await running.post("/v1/chat/completions", body)).json()["usage"]
        response = await running.post("/v1/chat/completions", body)
        warm = response.json()["usage"]
        assert cold["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["prompt_tokens_details"]["cached_tokens"] == 64
        assert warm["total_tokens"] == warm["prompt_tokens"] + 8
        for name in ("restore;dur=", "prefill;dur=", "decode;dur=", "ttft;dur="):
            assert name in response.headers["server-timing"]


async def test_prompts_may_be_texts_ids_or_lists_and_n_multiplies_them(start: Any) -> None:
    async with start() as running:
        for prompt, count in (("a", 1), (["a", "b"], 2), ([97, 98], 1), ([[97], [98], [99]], 3)):
            body = {"prompt": prompt, "n": 2, "max_tokens": 4, "seed": 7}
            found = (await running.post("/v1/completions", body)).json()
            assert [one["index"] for one in found["choices"]] == list(range(2 * count))
            assert all(len(one["text"]) == 4 for one in found["choices"])
            assert found["usage"]["completion_tokens"] == 8 * count
        assert found["usage"]["prompt_tokens"] == 3
        assert {(ask.sampling.seed, ask.n) for ask in running.fake.asks} == {(7, 2)}


async def test_a_schema_reaches_the_model_in_every_form_that_clients_know(start: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    anthropic = {"type": "json_schema", "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with start() as running:
        chat, messages = "/v1/chat/completions", "/v1/messages"
        for path, more in (
            (chat, {"response_format": {"type": "text"}}),
            (chat, {"response_format": {"type": "json_object"}}),
            (chat, {"response_format": openai}),
            (messages, {"output_format": anthropic}),
            (messages, {"output_config": {"format": anthropic, "effort": "low"}}),
        ):
            assert (await running.post(path, HELLO | more)).status_code == 200
        texts = [ask.sampling.json_schema for ask in running.fake.asks]
        assert texts[0] == "" and json.loads(texts[1]) == {"type": "object"}
        assert [json.loads(text) for text in texts[2:]] == [schema] * 3
        both = await running.post(chat, HELLO | {"response_format": openai, "tools": [tool]})
        assert both.json()["error"]["code"] == "unsupported_parameter"
        running.fake.can_guide = False
        for path, more in (
            (chat, {"response_format": openai}),
            (messages, {"output_format": anthropic}),
        ):
            refused = await running.post(path, HELLO | more)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "unsupported_parameter"


async def test_what_a_request_says_of_its_turn_reaches_the_model(start: Any) -> None:
    async with start() as running:
        more = {"priority": 7, "deadline_s": 2.5, "cache_salt": "me", "no_store": True}
        for path, body in (
            ("/v1/completions", {"prompt": "a", "n": 3}),
            ("/v1/chat/completions", HELLO | {"n": 2}),
            ("/v1/messages", HELLO),
        ):
            assert (await running.post(path, body | more)).status_code == 200
            for wrong in ({"priority": 101}, {"priority": 0.5}, {"deadline_s": 0}):
                assert (await running.post(path, body | wrong)).status_code == 400
        asks = running.fake.asks
        assert [ask.n for ask in asks] == [3, 2, 1]
        assert all((ask.priority, ask.deadline_s) == (7, 2.5) for ask in asks)
        assert all((ask.salt, ask.no_store) == ("me", True) for ask in asks)


async def test_every_choice_of_a_stream_is_whole(start: Any) -> None:
    async with start() as running:
        body = {"prompt": ["a", "b"], "max_tokens": 5, "stream": True, "n": 2, "temperature": 0}
        response = await running.post("/v1/completions", body)
        texts: dict[int, str] = {}
        for one in events_of(response.text)[:-1]:
            for choice in json.loads(one)["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        whole = (await running.post("/v1/completions", body | {"stream": False})).json()
        assert texts == {one["index"]: one["text"] for one in whole["choices"]}


async def test_log_probabilities_come_in_both_forms(start: Any) -> None:
    async with start() as running:
        body = HELLO | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}
        found = (await running.post("/v1/chat/completions", body)).json()["choices"][0]
        entries = found["logprobs"]["content"]
        assert len(entries) == 2 and entries[0]["logprob"] == -0.5
        assert [len(one["top_logprobs"]) for one in entries] == [2, 2]
        assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
        streamed = await running.post("/v1/chat/completions", body | {"stream": True})
        pieces = [
            json.loads(one)["choices"][0]["logprobs"] for one in events_of(streamed.text)[:-1]
        ]
        assert sum(len(one["content"]) for one in pieces if one) == 2
        plain = {"prompt": "a", "logprobs": 1, "max_tokens": 3}
        logprobs = (await running.post("/v1/completions", plain)).json()["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 1, 2] and len(logprobs["top_logprobs"]) == 3


def events_of(text: str) -> list[str]:
    """The data of each event."""
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]


def ids(text: str) -> list[int]:
    """Bytes, with marks as control tokens, and the end."""
    found: list[int] = []
    marks = {"<|tool_call>": 257, "<tool_call|>": 258, '<|"|>': 259}
    while text:
        mark = next((one for one in marks if text.startswith(one)), None)
        found.append(marks[mark] if mark else ord(text[0]))
        text = text[len(mark) if mark else 1 :]
    return [*found, 256]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = 'Let me see.<|tool_call>call:weather{city:<|"|>Oslo, {N}<|"|>,days:3}<tool_call|>'


NAMED = {"type": "function", "function": {"name": "weather"}}
NO_SUCH_TOOL = ("invalid_value", "tool_choice")
NAME_OF_TOOL = "tools[0].function.name"
WRONG_TOOL = {"type": "function", "function": {"name": "two words"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_is_asked_for_is_held_to_the_form_of_the_model(
    start: Any, choice: Any
) -> None:
    async with start() as running:
        running.fake.script = lambda prompt: ids(CALL.removeprefix("Let me see."))
        body = HELLO | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        found = (await running.post("/v1/chat/completions", body)).json()["choices"][0]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        assert found["message"]["tool_calls"][0]["function"]["name"] == "weather"
        grammar = running.fake.asks[0].sampling.grammar
        assert grammar.startswith("start: <[257]> call <[258]>") and "call:weather" in grammar
        await running.post("/v1/chat/completions", body | {"tool_choice": "auto"})
        assert running.fake.asks[1].sampling.grammar == ""


async def test_a_call_cannot_be_asked_for_without_the_schema_extra(start: Any) -> None:
    async with start() as running:
        running.fake.can_guide = False
        body = HELLO | {"tools": TOOLS, "tool_choice": "required"}
        error = await refused(running, "/v1/chat/completions", body)
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tool_choice")
        assert "schema extra" in error["message"]


async def test_gemmas_tool_calls_become_openais(start: Any) -> None:
    async with start() as running:
        running.fake.script = lambda prompt: ids(CALL)
        body = HELLO | {"tools": TOOLS, "max_tokens": 200}
        choice = (await running.post("/v1/chat/completions", body)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        call = choice["message"]["tool_calls"][0]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo, {N}", "days": 3}
        response = await running.post("/v1/chat/completions", body | {"stream": True})
        deltas = [json.loads(one)["choices"][0]["delta"] for one in events_of(response.text)[:-1]]
        assert "".join(one.get("content", "") for one in deltas) == "Let me see."
        assert [one["tool_calls"][0]["index"] for one in deltas if "tool_calls" in one] == [0]


async def test_without_tools_the_same_text_is_content(start: Any) -> None:
    async with start() as running:
        running.fake.script = lambda prompt: ids(CALL)
        found = (await running.post("/v1/chat/completions", HELLO | {"max_tokens": 200})).json()
        assert found["choices"][0]["message"]["content"].startswith("Let me see.call:weather{")
        assert found["choices"][0]["finish_reason"] == "stop"


async def test_tools_that_a_template_does_not_know_are_refused(start: Any) -> None:
    async with start() as running:
        running.fake.template = "plain"
        error = await refused(running, "/v1/chat/completions", HELLO | {"tools": TOOLS})
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")


async def refused(running: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = await running.post(path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": None}, "missing_parameter", "messages"),
        ({"messages": "hello"}, "invalid_type", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "boss", "content": ""}]}, "invalid_value", "messages[0].role"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"n": 1000}, "invalid_value", "n"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"pin": True}, "unsupported_parameter", "pin"),
        ({"pin": 60}, "unsupported_parameter", "pin"),
        ({"pin": -1}, "invalid_value", "pin"),
        ({"pin": "long"}, "invalid_type", "pin"),
        ({"response_format": {"type": "json"}}, "invalid_value", "response_format"),
        (
            {"response_format": {"type": "json_schema"}},
            "invalid_value",
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "must"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "invalid_value", "tool_choice"),
        ({"tool_choice": NAMED | {"function": {"name": "x"}}, "tools": TOOLS}, *NO_SUCH_TOOL),
        (
            {"tool_choice": {"type": "custom"}, "tools": TOOLS},
            "unsupported_parameter",
            "tool_choice",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "invalid_value", NAME_OF_TOOL),
        ({"tool_choice": "required", "tools": [WRONG_TOOL]}, "invalid_value", NAME_OF_TOOL),
        ({"bananas": 3}, "unknown_parameter", "bananas"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_content",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "unsupported_content",
            "messages[0].content[0]",
        ),
    ],
)
async def test_a_wrong_field_is_named(
    start: Any, change: dict[str, Any], code: str, param: str | None
) -> None:
    async with start() as running:
        error = await refused(running, "/v1/chat/completions", HELLO | change)
        assert (error["code"], error["param"]) == (code, param)
        assert running.fake.asks == []


async def test_what_clients_send_and_nothing_here_depends_on_is_ignored(start: Any) -> None:
    async with start() as running:
        extra = {"user": "u", "store": False, "metadata": {}, "best_of": 1, "seed": None, "n": 1}
        response = await running.post("/v1/chat/completions", HELLO | extra)
        assert response.status_code == 200


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"nul", b'{"prompt":"\xff"}', b"[" * 20_000])
async def test_what_is_no_json_object_is_told_so(start: Any, data: bytes) -> None:
    async with start() as running:
        response = await running.client.post("/v1/completions", content=data)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"


async def test_errors_of_the_engine_have_codes_and_numbers(start: Any) -> None:
    async with start() as running:
        path = "/v1/completions"
        error = await refused(running, path, {"prompt": "x" * 5000})
        assert error["code"] == "context_length_exceeded" and "4095" in error["message"]
        assert (await refused(running, path, {"prompt": ""}))["code"] == "empty_prompt"
        error = await refused(running, path, {"prompt": "x", "model": "other"}, 404)
        assert error["code"] == "model_not_found" and "tiny" in error["message"]
        for raised, status, code in (
            (RequestFailed("no"), 500, "generation_failed"),
            (EngineDied("gone"), 503, "engine_failed"),
            (ContextExceeded("no"), 400, "context_length_exceeded"),
            (QueueFull("full"), 429, "queue_full"),
            (KvMemoryExceeded("no"), 400, "kv_memory_exceeded"),
            (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        ):
            running.fake.error = raised
            response = await running.post(path, {"prompt": "x"})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in response.headers) == (status in (429, 503))
            running.fake.error = None


async def test_an_error_in_a_running_stream_is_its_last_event(start: Any) -> None:
    async with start() as running:

        def pace(index: int) -> None:
            if index == 3:
                running.fake.error = EngineDied("gone")

        running.fake.pace = pace
        response = await running.post("/v1/completions", {"prompt": "x", "stream": True})
        *chunks, last = events_of(response.text)
        assert response.status_code == 200 and len(chunks) == 3
        assert json.loads(last)["error"]["code"] == "engine_failed"


async def test_an_error_before_the_first_token_has_a_status_even_in_a_stream(start: Any) -> None:
    async with start() as running:
        running.fake.error = EngineDied("gone")
        response = await running.post("/v1/completions", {"prompt": "x", "stream": True})
        assert response.status_code == 503


async def test_one_model_needs_no_name_and_several_do(start: Any) -> None:
    async with start(names=("a", "b")) as running:
        error = await refused(running, "/v1/completions", {"prompt": "x"}, 404)
        assert "a, b" in error["message"]
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["a", "b"]
        assert listed[0]["millpond"]["state"] == "unloaded"
        assert (await running.client.get("/v1/models/b")).json()["id"] == "b"
        assert (await running.client.get("/v1/models/c")).status_code == 404


async def test_text_and_ids_there_and_back(start: Any) -> None:
    async with start() as running:
        found = (await running.post("/tokenize", {"content": "ab"})).json()
        assert found == {"tokens": [97, 98], "count": 2, "max_model_len": 4096}
        assert (await running.post("/detokenize", {"tokens": [97, 98]})).json()["content"] == "ab"
        chat = {"messages": [{"role": "user", "content": "ab"}]}
        assert (await running.post("/tokenize", chat)).json()["count"] == 11
        assert (await running.post("/tokenize", {})).status_code == 400
        assert (await running.post("/detokenize", {"tokens": [-1]})).status_code == 400


async def test_wrong_routes_and_methods_are_told_in_openais_form(start: Any) -> None:
    async with start() as running:
        assert (await running.client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        response = await running.client.get("/v1/completions")
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
