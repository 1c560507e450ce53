"""Bodies, without a server: what is counted, and what is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.actors.http import body_ids, body_values
from millpond.actors.http.bodies import ChatBody, CompletionBody
from millpond.actors.http.body_ids import ids_of, take_lists
from millpond.actors.http.body_reading import parse, parse_long
from millpond.actors.http.completions import prompts_of
from millpond.actors.http.problems import ApiError

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def counted(found: Any) -> tuple[int, int]:
    """Return commas between values, and containers."""
    if not isinstance(found, list | dict):
        return 0, 0
    inner = list(found.values() if isinstance(found, dict) else found)
    pairs = [counted(one) for one in inner]
    commas = max(0, len(inner) - 1) + sum(pair[0] for pair in pairs)
    return commas, 1 + sum(pair[1] for pair in pairs)


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from((1, 2, 3, 7, 2**18)))
def test_values_are_counted_whatever_their_texts_hold(found: Any, slice_bytes: int) -> None:
    commas, containers = counted(found)
    data = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_values, "SLICE_BYTES", slice_bytes)
        patch.setattr(body_values, "VALUES_MAX", commas)
        patch.setattr(body_values, "CONTAINERS_MAX", containers)
        body_values.check_values(data)
        if containers:
            patch.setattr(body_values, "CONTAINERS_MAX", containers - 1)
            with pytest.raises(ApiError):
                body_values.check_values(data)


SPACE = st.sampled_from(("", "", " ", "\n", "\t \r"))
ID = st.integers(0, 2**32 - 1) | st.sampled_from((0, 9, 10, 2**32 - 1))


@settings(max_examples=150, deadline=None)
@given(st.lists(ID, min_size=1, max_size=40), SPACE, st.integers(1, 30))
def test_long_lists_of_ids_are_read_as_a_decoder_reads_them(
    ids: list[int], space: str, slice_bytes: int
) -> None:
    text = space + f"{space},{space}".join(map(str, ids)) + space
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_ids, "SLICE_BYTES", slice_bytes)
        assert list(ids_of(text.encode()) or ()) == ids


@settings(max_examples=300, deadline=None)
@given(st.text("0123,, .-e[]", max_size=30), st.integers(1, 8))
def test_what_is_no_list_of_ids_is_never_read_as_one(text: str, slice_bytes: int) -> None:
    try:
        wanted = json.loads(f"[1{text}]")
    except ValueError:
        wanted = []
    good = bool(wanted) and all(type(one) is int and 0 <= one < 2**32 for one in wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_ids, "SLICE_BYTES", slice_bytes)
        found = ids_of(b"1" + text.encode())
    assert (found is not None and list(found)) == (good and wanted)


@settings(max_examples=200, deadline=None)
@given(JSON, st.lists(ID, min_size=5, max_size=9), st.integers(1, 20))
def test_lists_are_taken_out_of_any_json_and_out_of_no_text(
    found: Any, ids: list[int], slice_bytes: int
) -> None:
    texts = [f"{ids}", f'"[{ids}]', "\\", f"\\\\{ids}"]
    data = json.dumps([found, ids, texts, [ids, {"a": ids}], found]).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_values, "SLICE_BYTES", slice_bytes)
        patch.setattr(body_ids, "LONG_BYTES", 8)
        taken = take_lists(data)

    def marked(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: marked(inner) for key, inner in one.items()}
        if not isinstance(one, list):
            return one
        if len(one) == 1 and type(one[0]) is int and one[0] in taken.lists:
            return list(taken.lists[one[0]])
        return [marked(inner) for inner in one]

    assert marked(json.loads(taken.short)) == json.loads(data)
    assert len(taken.lists) >= 3


def test_a_long_body_is_read_as_a_short_one_is() -> None:
    ids = list(range(40_000))
    for prompt in (ids, [ids, ids], "x" * 70_000, ["y" * 70_000]):
        data = json.dumps({"prompt": prompt, "max_tokens": 3, "echo": False}).encode()
        short, long = parse(data, CompletionBody), parse_long(data, CompletionBody)
        assert long.max_tokens == short.max_tokens
        assert [_plain(one) for one in prompts_of(long.prompt)] == prompts_of(short.prompt)


def test_a_long_body_is_refused_as_a_short_one_is() -> None:
    ids = ",".join(map(str, range(40_000)))
    for text, code, param in (
        (f'{{"prompt":[{ids},1.5]}}', "invalid_type", "prompt[40000]"),
        (f'{{"prompt":[[{ids}],[{ids},"x"]]}}', "invalid_type", "prompt[1][40000]"),
        (f'{{"prompt":[{ids}],"n":0}}', "invalid_value", "n"),
        (f'{{"prompt":[{ids}]', "invalid_json", None),
        (f'{{"prompt":"x","functions":[{ids}]}}', "unsupported_parameter", "functions"),
        (f'{{"prompt":"x","nothing":[{ids}]}}', "unknown_parameter", "nothing"),
    ):
        with pytest.raises(ApiError) as caught:
            parse_long(text.encode(), CompletionBody)
        assert (caught.value.code, caught.value.param) == (code, param)
    many = json.dumps({"prompt": "x", "stop": ["x"] * 300_000}).encode()
    with pytest.raises(ApiError) as caught:
        parse_long(many, CompletionBody)
    assert caught.value.code == "body_too_complex"


def _plain(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else list(prompt)


@settings(max_examples=150, deadline=None)
@given(st.binary() | JSON.map(lambda found: json.dumps(found).encode()))
def test_whatever_comes_is_a_body_or_an_error_of_the_clients(data: bytes) -> None:
    for kind in (CompletionBody, ChatBody):
        with pytest.raises(ApiError) as caught:
            parse(data, kind)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"[]", "invalid_json", None),
        (b"5", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"prompt":"x"}x', "invalid_json", None),
        (b'{"prompt":"\xff"}', "invalid_json", None),
        (b'{"prompt":"x","temperature":1e999}', "invalid_value", "temperature"),
        (b'{"prompt":"x","n":null,"seed":[]}', "invalid_type", "seed"),
        (b'{"prompt":null}', "missing_parameter", "prompt"),
        (b'{"prompt":{}}', "invalid_type", "prompt"),
        (b'{"prompt":' + b"[" * 5000, "invalid_json", None),
        (b'{"prompt":"x","bananas":NaN}', "invalid_json", None),
    ],
)
def test_what_is_wrong_is_named(data: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(data, CompletionBody)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_the_last_of_two_fields_of_one_name_counts() -> None:
    assert parse(b'{"prompt":"x","prompt":"y"}', CompletionBody).prompt == "y"
