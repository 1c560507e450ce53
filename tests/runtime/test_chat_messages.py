"""What a chat template is given: messages, tools and variables, checked."""

from __future__ import annotations

from typing import Any

import pytest
from millpond.runtime.chat import ChatOptions, ChatTemplate
from millpond.runtime.errors import ChatTemplateError, InvalidParameter


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<bos>", "<eos>")


CHATML = template("""{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{{- message.content + '<|im_end|>\n' }}{% endfor %}""")

GEMMA = template("""{{ bos_token }}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and loop.first -%}
    {{ raise_exception('roles must alternate between user and assistant') }}
  {%- endif -%}
  {{ '<start_of_turn>' + message.role + '\n' }}
  {%- if message.content is string -%}
    {{ message.content | trim }}
  {%- else -%}
    {%- for item in message.content -%}{{ item.text | trim }}{%- endfor -%}
  {%- endif -%}
  {{ '<end_of_turn>\n' }}
{%- endfor -%}""")

PARTS_ONLY = template("""{% for m in messages %}<start_of_turn>{{ m.role }}
{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
<end_of_turn>{% endfor %}""")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_contents_are_given_as_the_template_reads_them() -> None:
    assert CHATML.content_form == "text"
    assert GEMMA.content_form == "both"
    assert PARTS_ONLY.content_form == "parts"
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
    assert " a \nb<|im_end|>" in CHATML.render(user(parts))
    assert "ab<end_of_turn>" in GEMMA.render(user(parts))
    assert "user\nhi<end_of_turn>" in PARTS_ONLY.render(user("hi"))


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    chat = [{"role": "developer", "content": "Be kind."}, *user("hi")]
    assert "<start_of_turn>system\nBe kind." in GEMMA.render(chat)
    assert (
        ChatTemplate("{{ messages[0].role }} {# developer #}", "", "").render(chat) == "developer "
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "found 0, expected 1 to"),
        ("hi", "found str, expected a list"),
        (["hi"], r"messages\[0\]: found str"),
        ([{"content": "hi"}], r"messages\[0\].role: found None"),
        ([{"role": "root", "content": "hi"}], "found 'root', expected one of system"),
        ([{"role": ["user"], "content": "hi"}], r"role: found \['user'\]"),
        ([{"role": "user", "content": 7}], "content: found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]: expected a text"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\]: expected a text"),
        ([{"role": "user", "content": "", "name": {1: 2}}], "found a key 1"),
        ([{"role": "user", "content": "", "name": b"x"}], "found bytes, expected JSON"),
    ],
)
def test_messages_that_are_none_are_the_callers_fault(messages: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        CHATML.render(messages)


def test_nesting_and_count_of_values_are_bounded() -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    for tools in ([{"a": nested}], [{"a": list(range(200_000))}]):
        with pytest.raises(InvalidParameter, match="expected at most"):
            CHATML.render(user("hi"), ChatOptions(tools=tools))


def test_variables_cannot_replace_what_a_template_is_given() -> None:
    options = ChatOptions(variables={"bos_token": "<eos>"})
    with pytest.raises(InvalidParameter, match="bos_token cannot be given"):
        GEMMA.render(user("hi"), options)


def test_a_missing_template_is_said() -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate("", "<bos>", "<eos>")


def test_a_refusal_of_the_template_is_its_text() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        GEMMA.render([{"role": "assistant", "content": "hi"}])
