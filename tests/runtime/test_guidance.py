"""Answers held to a JSON schema, on a tiny real model, and what is no schema."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from millpond.codecs.choices import AnswerForm
from millpond.runtime import RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.errors import InvalidParameter
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.guidance import GuideError, Guides
from millpond.runtime.testing.tiny_model import EOS, TOKENS, tiny_gemma3
from millpond.runtime.tokenizer import make_tokenizer
from millpond.runtime.vocabulary import read_vocabulary

pytest.importorskip("llguidance", reason="the schema extra is not installed")
SHAPE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "ü"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tame": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "legs", "tame", "names"],
    "additionalProperties": False,
}
TEXT = json.dumps(SHAPE)


def form(schema: str) -> AnswerForm:
    return AnswerForm("json_schema", schema)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3())
    return path


@pytest.fixture
def guides(model: Path) -> Guides:
    with GgufFile.open(str(model)) as file:
        return Guides(make_tokenizer(read_vocabulary(file.metadata, len(TOKENS))))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_every_answer_has_the_form_of_its_schema_whoever_decodes_beside_it(
    model: Path,
) -> None:
    texts: list[str] = []
    plain: list[str] = []
    async with open_runtime(RuntimeConfig(model=str(model), spill=False)) as runtime:

        async def ask(seed: int) -> None:
            sampling = SamplingParams(
                max_tokens=400, temperature=1.0, seed=seed, json_schema=TEXT, logprobs=3
            )
            done = await runtime.generate("abc", sampling)
            assert done.finish_reason == "stop"
            assert all(np.isfinite([v for _, v in one.top]).all() for one in done.logprobs)
            texts.append(done.text)

        async def other() -> None:
            done = await runtime.generate("abc", SamplingParams(max_tokens=20, ignore_eos=True))
            plain.append(done.text)

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(ask, seed)
            group.start_soon(other)
        greedy = await runtime.generate("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    for text in texts:
        found: Any = json.loads(text)
        assert list(found) == list(SHAPE["properties"])  # type: ignore[call-overload]
        assert found["kind"] in ("cat", "dog", "ü") and 0 <= found["legs"] <= 99
        assert isinstance(found["tame"], bool) and len(found["names"]) <= 2
    assert len(set(texts)) > 1 and plain == [greedy.text]


@pytest.mark.anyio
async def test_a_schema_that_is_none_is_refused_before_anything_runs(model: Path) -> None:
    async with open_runtime(RuntimeConfig(model=str(model), spill=False)) as runtime:
        with pytest.raises(InvalidParameter, match="json_schema"):
            await runtime.generate("a", SamplingParams(json_schema='{"type":"nope"}'))
        assert runtime.statistics().gateway.live == 0
        done = await runtime.generate("a", SamplingParams(max_tokens=2))
        assert done.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "{",
        "[]",
        "5",
        '{"type":"nope"}',
        '{"$ref":"https://nowhere.example/x"}',
        '{"$ref":"file:///etc/passwd"}',
        '{"type":"string","pattern":"(?=x)"}',
        '{"type":"string","pattern":"("}',
        '{"type":"integer","minimum":5,"maximum":3}',
        '{"type":"string","not":{"const":"x"}}',
        '{"a":' * 5000,
        '{"items":' * 100 + "{}" + "}" * 100,
        json.dumps({"enum": ["x" * 9] * 20_000}),
        '{"type":"string","pattern":"((a{1,900}){1,900}){1,900}"}',
    ],
)
def test_a_hostile_schema_is_refused_or_stays_within_its_limits(
    guides: Guides, schema: str
) -> None:
    try:
        guides.check(form(schema))
    except InvalidParameter as error:
        assert "json_schema" in str(error)
    else:  # it compiles: then its first mask is bounded too
        with suppress(GuideError):
            guides.start(form(schema)).allowed(len(TOKENS))


def test_references_within_a_schema_and_recursion_are_followed(guides: Guides) -> None:
    schema = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}},
                "additionalProperties": False,
            }
        },
    }
    guide = guides.start(form(json.dumps(schema)))
    for byte in b'{"left":{"left":{}}}':
        token = _id_of(byte)
        assert guide.allowed(len(TOKENS))[token]
        guide.take(token)
    assert np.flatnonzero(guide.allowed(len(TOKENS))).tolist() == sorted([EOS, _end_of_turn()])
    guide.take(EOS)
    assert guide.allowed(len(TOKENS))[EOS]  # who ignores the end gets it again and again


def test_a_token_that_is_not_allowed_breaks_its_guide_only(guides: Guides) -> None:
    one, other = guides.start(form(TEXT)), guides.start(form(TEXT))
    with pytest.raises(GuideError):
        one.take(_id_of(ord("x")))
    assert other.allowed(len(TOKENS))[_id_of(ord("{"))]
    assert not other.allowed(len(TOKENS) + 7)[len(TOKENS) :].any()


@pytest.mark.parametrize("inner", ["ref", "items"])
def test_a_long_chain_of_references_is_refused(guides: Guides, inner: str) -> None:
    """The library follows references by recursion: 2,500 of them ended the whole process."""
    links: list[Any] = [{"$ref": f"#/$defs/a{number + 1}"} for number in range(2500)]
    links = [one if inner == "ref" else {"type": "array", "items": one} for one in links]
    chain = {f"a{number}": link for number, link in enumerate(links)} | {"a2500": {}}
    with pytest.raises(InvalidParameter, match="levels behind references"):
        guides.check(form(json.dumps({"$ref": "#/$defs/a0", "$defs": chain})))
    many = {f"a{number}": {"type": "string"} for number in range(100)}
    items = [{"$ref": f"#/$defs/{name}"} for name in many]
    guides.check(form(json.dumps({"anyOf": items, "$defs": many})))


@pytest.mark.anyio
async def test_an_answer_has_the_form_of_its_grammar(model: Path) -> None:
    grammar = 'start: "a" ("b" | "c"){3} NUMBER\nNUMBER: /[0-9]{2}/'
    async with open_runtime(RuntimeConfig(model=str(model), spill=False)) as runtime:
        for seed in range(4):
            sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=seed, grammar=grammar)
            done = await runtime.generate("abc", sampling)
            assert re.fullmatch("a[bc]{3}[0-9]{2}", done.text) and done.finish_reason == "stop"
        for wrong in ("start: nothing", "start: /(/", "start: " + "(" * 100 + ")" * 100):
            with pytest.raises(InvalidParameter, match="grammar"):
                await runtime.generate("abc", SamplingParams(grammar=wrong))
        with pytest.raises(InvalidParameter, match="grammar"):
            await runtime.generate("abc", SamplingParams(grammar=grammar, json_schema="{}"))


def test_many_schemas_are_not_kept_for_ever(guides: Guides) -> None:
    for number in range(100):
        guides.check(form(json.dumps({"const": number})))
    assert repr(guides) == "<Guides 32 compiled>"


def _id_of(byte: int) -> int:
    text = bytes([byte])
    return TOKENS.index(text) if text in TOKENS else TOKENS.index(b"<0x%02X>" % byte)


def _end_of_turn() -> int:
    return TOKENS.index(b"<end_of_turn>")
