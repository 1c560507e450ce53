"""Forced calls: whatever a model would write, its turn is one call of a tool in the model's form."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from millpond.actors.http.chat import turn_reader
from millpond.actors.http.forced_calls import grammar_of
from millpond.actors.http.problems import ApiError
from millpond.codecs.choices import AnswerForm
from millpond.runtime.errors import InvalidParameter
from millpond.runtime.results import StreamedToken
from millpond.runtime.testing.fake_served import CONTROL, END, FakeServed

TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "of a city [{ and so on",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name"},
                "unit": {"enum": ["C", "F", ""]},
                "days": {"type": "integer"},
                "exact": {"type": ["boolean", "null"]},
                "default": {"anyOf": [{"type": "number"}, {"const": "none"}]},
                "a,key": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["city", "days"],
        },
    },
    {"name": "now"},
    {
        "name": "plant.tree",
        "parameters": {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/tree"}, "spot": {}},
            "required": ["tree"],
            "$defs": {"tree": TREE},
        },
    },
]
FORMS = {
    "gemma": "tools <|tool_call>",
    "gemma as text": "tools <|tool_call>",
    "hermes": "tools <tool_call> arguments",
    "mistral": "tools [TOOL_CALLS]",
    "llama": "tools <|python_tag|> parameters",
    "bare": 'tools {"name": .., "parameters": ..}',
}


class ByteTokenizer:
    """Ids are bytes, as those of the fake model."""

    vocab_size = 260
    end_ids = frozenset({END})

    def __init__(self, has_control: bool) -> None:
        self._has_control = has_control

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def piece(self, token_id: int) -> bytes:
        if token_id < END:
            return bytes([token_id])
        return b"" if self._has_control or token_id == END else CONTROL[token_id].encode()

    def raw_piece(self, token_id: int) -> bytes:
        return self.piece(token_id) or CONTROL.get(token_id, "<end>").encode()


class TextMarks(FakeServed):
    """A model whose marks are tokens with a text, as Gemma 4's are."""

    def special_id(self, text: str) -> int | None:
        return None

    def special_text(self, token_id: int) -> str:
        return ""


def listed(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": one} for one in functions]


def turn_of(form: str, name: str, seed: int) -> tuple[list[Any], bytes]:
    """What is read of a turn whose tokens are drawn from those that are allowed."""
    guidance = pytest.importorskip("millpond.runtime.guidance")
    pytest.importorskip("llguidance", reason="the schema extra is not installed")
    tokenizer = ByteTokenizer("text" not in form)
    model = TextMarks() if "text" in form else FakeServed()
    model.template = FORMS[form]
    guide = guidance.Guides(tokenizer).start(
        AnswerForm("grammar", grammar_of(model, listed(TOOLS), name))
    )
    reader, draw = turn_reader(model, True), random.Random(seed)
    found, written, index = [], b"", 0
    while True:
        allowed = [int(one) for one in guide.allowed(tokenizer.vocab_size).nonzero()[0]]
        # printable, and what ends a text or the turn now and then: else a text has no end
        ending = [one for one in allowed if one >= END or one in b'"}]']
        plain = [one for one in allowed if 32 <= one < 127] or allowed
        token_id = draw.choice(ending if ending and draw.random() < 0.3 else plain)
        guide.take(token_id)
        if token_id == END:
            return [*found, *reader.finish()], written
        text = tokenizer.piece(token_id).decode("latin-1")
        written += tokenizer.raw_piece(token_id)
        found += reader.push(StreamedToken(token_id=token_id, text=text, index=index))
        index += 1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", FORMS)
def test_a_forced_turn_is_one_call_that_its_schema_allows(form: str, seed: int) -> None:
    found, written = turn_of(form, "", seed)
    assert [one.kind for one in found] == ["call"], written
    call = found[0]
    arguments = json.loads(call.text)
    parameters = next(one for one in TOOLS if one["name"] == call.name).get("parameters", {})
    properties = parameters.get("properties", {})
    order = [key for key in properties if key in arguments]
    assert list(arguments) == order, written
    assert set(parameters.get("required", ())) <= set(arguments), written
    for key, value in arguments.items():
        check(properties[key], value)


def check(schema: dict[str, Any], value: Any) -> None:
    match schema:
        case {"type": "string"}:
            assert isinstance(value, str)
        case {"type": "integer"}:
            assert type(value) is int
        case {"type": ["boolean", "null"]}:
            assert value is None or type(value) is bool
        case {"enum": values}:
            assert value in values
        case {"anyOf": _}:
            assert type(value) in (int, float) or value == "none"
        case {"items": _}:
            assert isinstance(value, list) and {type(one) for one in value} <= {bool}
        case {"$ref": _}:
            check_tree(value)


def check_tree(value: Any) -> None:
    assert type(value["value"]) is int and set(value) <= {"value", "left"}
    if "left" in value:
        check_tree(value["left"])


@pytest.mark.parametrize("form", FORMS)
def test_a_named_function_is_the_one_that_is_called(form: str) -> None:
    for seed in range(3):
        found, written = turn_of(form, "now", seed)
        assert [(one.kind, one.name, one.text) for one in found] == [("call", "now", "{}")], written


def test_a_text_never_holds_the_mark_that_ends_it() -> None:
    from millpond.runtime.guidance import Guides

    pytest.importorskip("llguidance", reason="the schema extra is not installed")
    model = FakeServed(template=FORMS["gemma"])
    form = AnswerForm("grammar", grammar_of(model, listed(TOOLS), "weather"))
    guide = Guides(ByteTokenizer(True)).start(form)
    for token_id in [257, *b"call:weather{city:", 259, *b'<|"|']:
        guide.take(token_id)
    assert not guide.allowed(260)[ord(">")] and guide.allowed(260)[ord("|")]


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize("parameters", [5, [], "x", {"type": "string"}, {"type": 3}, DEEP])
@pytest.mark.parametrize("form", ["gemma", "hermes"])
def test_a_schema_that_is_none_of_an_object_is_named(form: str, parameters: Any) -> None:
    model = FakeServed(template=FORMS[form])
    with pytest.raises(ApiError) as caught:
        grammar_of(model, listed([{"name": "f", "parameters": parameters}]), "")
    assert caught.value.param == "tools[0].function.parameters"


CHAIN = {f"a{number}": {"items": {"$ref": f"#/$defs/a{number + 1}"}} for number in range(5000)}
HOSTILE: list[Any] = [
    # the library follows references by recursion: a chain of some thousand ended the process
    {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": CHAIN},
    {"properties": {"a": {"$ref": "#/$defs/a~0"}}, "$defs": {"a~0": {"$ref": "#/"}}},
    {"properties": {"a": {"type": "nope"}}},
    {"properties": {"a": {"enum": []}}},
    {"properties": {"a": {"enum": 3}}},
    {"properties": {"a": {"const": {"b": 1}}}},
    {"properties": {"a": {"$ref": "#/$defs/none"}}},
    {"properties": {"a": {"$ref": "#"}}},
    {"properties": {"a": {"$ref": "https://nowhere.example/x"}}},
    {"properties": {"a": {"anyOf": []}}},
    {"properties": {"a": {"anyOf": [3, None]}}},
    {"properties": {"a": {"type": []}}},
    {"properties": {"a": {"type": [[]]}}},
    {"properties": {"": {}, '"': {}, '<|"|>': {}, "\n\\": {"type": "string"}}},
    {"properties": {"a": {"type": "array", "items": [{}]}}},
    {"properties": {"a": {"type": "string", "pattern": "("}}},
    {"properties": {"a": {"not": {}}}},
    {"properties": 3, "required": 4},
    {"properties": {"a": 7}, "required": ["b", 3, []]},
    {"x-guidance": {"nope": 1}, "properties": {"a": {"x-guidance": 3}}},
    {"properties": {f"k{number}": {"type": "string"} for number in range(3000)}},
    {"properties": {"a": {"enum": ["\x00", "\ud7ff", 1e300, -0.0, True, None, "x" * 5000]}}},
]


@pytest.mark.parametrize("parameters", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("form", ["gemma", "hermes"])
def test_a_hostile_schema_is_refused_or_guides(form: str, parameters: Any) -> None:
    pytest.importorskip("llguidance", reason="the schema extra is not installed")
    from millpond.runtime.guidance import GuideError, Guides

    model = FakeServed(template=FORMS[form])
    try:
        text = grammar_of(model, listed([{"name": "f", "parameters": parameters}]), "")
        guides = Guides(ByteTokenizer(True))
        guides.check(AnswerForm("grammar", text))
        guides.start(AnswerForm("grammar", text)).allowed(260)
    except (ApiError, InvalidParameter, GuideError) as error:
        assert str(error)
