"""Bodies, without a server: what is counted, and what is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.actors.http import body_values
from millpond.actors.http.bodies import ChatBody, CompletionBody, parse
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
@given(JSON)
def test_values_are_counted_whatever_their_texts_hold(found: Any) -> None:
    commas, containers = counted(found)
    data = json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_values, "VALUES_MAX", commas)
        patch.setattr(body_values, "CONTAINERS_MAX", containers)
        body_values.check_values(data)
        if containers:
            patch.setattr(body_values, "CONTAINERS_MAX", containers - 1)
            with pytest.raises(ApiError):
                body_values.check_values(data)


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
