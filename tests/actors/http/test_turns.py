"""A model's turn, token by token: content, reasoning, tool calls; and what is none of these."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.actors.http.tool_calls import gemma_call, json_calls
from millpond.actors.http.turns import Segment, TurnReader, regions_of
from millpond.runtime.results import StreamedToken

GEMMA = "tools <|tool_call> <|channel>"
HERMES = "tools <tool_call> <think>"


def read(template: str, pieces: list[str], bare_json: bool = False) -> list[Segment]:
    """Feed pieces, adjacent segments of one kind joined."""
    reader = TurnReader(regions_of(template, True), lambda token_id: "", bare_json)
    found: list[Segment] = []
    for index, piece in enumerate(pieces):
        found += reader.push(StreamedToken(token_id=1, text=piece, index=index))
    found += reader.finish()
    joined: list[Segment] = []
    for one in found:
        if joined and joined[-1].kind == one.kind != "call":
            joined[-1] = Segment(one.kind, joined[-1].text + one.text)
        else:
            joined.append(one)
    return joined


def cut(text: str, seed: int) -> list[str]:
    source, pieces = random.Random(seed), []
    while text:
        size = source.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(20))
def test_however_a_turn_is_cut_it_reads_the_same(seed: int) -> None:
    text = (
        "<think>\nwhy <b> not</think>Well, <tool_ call <tool_call>\n"
        '{"name": "f", "arguments": {"a": [1, "<"]}}\n</tool_call>'
        '<tool_call>{"name": "g", "arguments": "{}"}</tool_call> done <tool_call>no'
    )
    assert read(HERMES, cut(text, seed)) == [
        Segment("reasoning", "why <b> not"),
        Segment("content", "Well, <tool_ call "),
        Segment("call", '{"a":[1,"<"]}', "f"),
        Segment("call", "{}", "g"),
        Segment("content", " done <tool_call>no"),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_gemmas_marks_read_the_same_however_cut(seed: int) -> None:
    text = (
        "<|channel>thought\nlet me<channel|>I ask.<|tool_call>call:find"
        '{q:<|"|>a, b}<|"|>,n:2,deep:{x:[true,null,-1.5]},empty:{}}<tool_call|>'
        "<|tool_call>nonsense<tool_call|>"
    )
    found = read(GEMMA, cut(text, seed))
    assert [one.kind for one in found] == ["reasoning", "content", "call", "content"]
    assert found[0].text == "let me" and found[1].text == "I ask."
    assert json.loads(found[2].text) == {
        "q": "a, b}",
        "n": 2,
        "deep": {"x": [True, None, -1.5]},
        "empty": {},
    }
    assert found[3].text == "<|tool_call>nonsense<tool_call|>"


@pytest.mark.parametrize("seed", range(5))
def test_a_turn_of_bare_json_is_a_call_only_if_it_is_one(seed: int) -> None:
    call = ' {"name": "f", "parameters": {"x": 1}}'
    assert read("tools", cut(call, seed), True) == [Segment("call", '{"x":1}', "f")]
    for text in ('{"name": "f"}', "[1, 2]", "{not json", '{"name": "f", "parameters": {}} more'):
        assert read("tools", cut(text, seed), True) == [Segment("content", text)]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='<>|{}[]":,tool_cal/think \n\\x', max_size=200), st.integers(0, 9))
def test_no_text_is_lost_and_nothing_raises(text: str, seed: int) -> None:
    for template in (GEMMA, HERMES, "tools [TOOL_CALLS]"):
        found = read(template, cut(text, seed))
        if not any(one.kind == "call" for one in found) and "<think>" not in text:
            assert "".join(one.text for one in found) == text


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet='{}[]<|">:,call nametrue-1.5', max_size=300))
def test_calls_of_hostile_text_are_none_or_json(text: str) -> None:
    for found in (gemma_call(text), gemma_call("call:f{" + text), *json_calls(text)):
        if found is not None:
            assert isinstance(json.loads(found.arguments), dict)


def test_deep_and_long_arguments_are_bounded() -> None:
    assert gemma_call("call:f{a:" + "[" * 5000 + "]" * 5000 + "}") is None
    assert json_calls("[" * 100_000) == []
    assert json_calls(json.dumps([{"name": "f", "arguments": {}}] * 1000)) != []
