"""Hostile and broken templates end with one clear error, in bounded time and memory."""

from __future__ import annotations

from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest
from millpond.runtime.chat import ChatTemplate
from millpond.runtime.chat_meter import Meter
from millpond.runtime.chat_sandbox import SOURCE_CHARS_MAX, compile_template, render
from millpond.runtime.errors import ChatTemplateError

CPU_S = 0.3
GROW = "{% set ns = namespace(s='a', t='a') %}{% for i in range(90) %}%s{% endfor %}"


def grown(step: str, end: str) -> str:
    return GROW.replace("%s", step) + end


def rendered(source: str, **variables: Any) -> str:
    return render(compile_template(source), variables, Meter(0, CPU_S))


HOSTILE = {
    "nested loops": "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "text in loops": "{% for i in range(99999) %}" * 2 + "a" * 999 + "{% endfor %}" * 2,
    "a block of text": "{% set x %}" + "{% for i in range(99999) %}" * 2 + "{{ 'a' * 999 }}"
    "{% endfor %}{% endfor %}{% endset %}",
    "doubling by ~": grown("{% set ns.s = ns.s ~ ns.s %}", "{{ ns.s }}"),
    "doubling by +": grown("{% set ns.s = ns.s + ns.s %}", "{{ ns.s }}"),
    "doubling a list": grown("{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s }}"),
    "doubling a list for JSON": grown("{% set ns.s = [ns.s, ns.s] %}", "{{ ns.s | tojson }}"),
    "doubling by dict": grown("{% set ns.s = dict(a=ns.s, b=ns.s) %}", "{{ ns.s | string }}"),
    "doubling a tuple": grown("{% set ns.s = (ns.s, ns.s) %}", "{{ {ns.s: 1} }}"),
    "comparing lists": grown(
        "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}", "{{ ns.s == ns.t }}"
    ),
    "comparing by test": grown(
        "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}", "{{ ns.s is eq(ns.t) }}"
    ),
    "sorting lists": grown(
        "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}", "{{ [ns.s, ns.t] | sort }}"
    ),
    "squaring": grown("{% set ns.s = (ns.s | int(7)) * (ns.s | int(7)) %}", "{{ ns.s }}"),
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "endless loop recursion": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a huge text": "{{ 'a' * 10**10 }}",
    "a huge text the other way": "{{ 10000000000 * 'a' }}",
    "a huge list": "{{ [1] * 10**9 }}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "a huge float": "{{ 9.0 ** 99999 }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a computed width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field by filter": "{{ '%9999999999d' | format(1) }}",
    "str.format": "{{ '{:9999999999}'.format(1) }}",
    "str.format by filter": "{{ ('{:9999999999}' | attr('format'))(1) }}",
    "str.center": "{{ 'a'.center(9999999999) }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "batch": "{{ [1] | batch(9999999999, 'x') | list }}",
    "indent": "{{ 'a\nb' | indent(9999999999) }}",
    "round": "{{ 1 | round(999999999, 'ceil') }}",
    "replace": "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "str.replace": "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "join": "{% set s = 'a' * 1000000 %}{{ range(99999) | join(s) }}",
    "str.join": "{% set s = 'a' * 1000000 %}{{ s.join(range(99999) | map('string')) }}",
    "slow search": "{% set s = 'a' * 4000000 %}{{ s.rfind('b' + 'a' * 2000000) }}",
    "slow strip": "{% set s = 'a' * 4000000 %}{{ s | trim('b' * 3000000 ~ 'a') }}",
    "lazy filters": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}"
    "{% endfor %}",
    "JSON": "{{ [1] | tojson(indent=999999999) }}",
    "the class of a text": "{{ ''.__class__.__mro__ }}",
    "the globals of a function": "{{ raise_exception.__globals__.x }}",
    "the environment of a macro": "{% macro f() %}{% endmacro %}{{ f._environment.x }}",
    "a file": "{% include '/etc/passwd' %}",
    "a change of its input": "{{ messages.append(1) }}",
    "an object": "{{ namespace() }}",
    "no template": "{% if %}",
    "an unknown filter": "{{ 'a' | frobnicate }}",
    "undefined": "{{ a.b.c }}",
    "division": "{{ 1 / 0 }}",
    "types": "{{ 1 + 'a' }}",
    "many brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long sum": "{{ " + "1 + " * 20000 + "1 }}",
    "deep blocks": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "a long format of time": "{{ strftime_now('%Y' * 1000) }}",
    "a long source": " " * (SOURCE_CHARS_MAX + 1),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_stopped(source: str) -> None:
    """Without the meter most of these would never come back, or fill the memory."""
    with pytest.raises(ChatTemplateError) as caught:
        rendered(source, messages=[])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_an_error_tells_the_line_and_the_reason() -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat template, line 3: no\b.*system here$"):
        rendered("a\nb\n{{ raise_exception('no\nsystem here') }}")
    with pytest.raises(ChatTemplateError, match="line 2: division by zero"):
        rendered("\n{{ 1 / 0 }}")


def test_a_hostile_template_does_not_hold_up_the_start() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(HOSTILE["nested loops"], "", "").render([{"role": "user", "content": "hi"}])


HARMLESS = [
    "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ {'k': 1.5} ~ missing }}",
    "{% for k, v in {'b': 1, 'a': (2, 3)} | dictsort %}{{ loop.index }}/{{ loop.length }}{{ k }}{{ v }}"
    "{{ ', ' if not loop.last }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content | trim | upper }}{% else %}none{% endfor %}",
    "{% for m in messages | selectattr('role', 'equalto', 'user') | list %}{{ m.content }}{% endfor %}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | length }}",
    "{{ messages[-1]['content'].split('o')[0].rstrip() }}{{ messages[::-1][0].role[1:] }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}",
    "{% macro turn(m, end='.') %}<{{ m.role }}>{{ caller() }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{% call turn(m, end='!') %}{{ m.content }}{% endcall %}{% endfor %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x * 3 }}{{ '%s-%03d' % (x, 7) }}{{ '%s' | format(x) }}",
    "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{% if i == 1 %}{% continue %}{% endif %}"
    "{{ i }}{% endfor %}",
    "{% filter replace('a', 'bb') %}banana{% endfilter %}{{ 'a\nb' | indent(2, true) }}",
    "{{ 'user' in messages[0].role }}{{ 'role' in messages[0] }}{{ messages is iterable }}{{ 3 in [1, 3] }}",
    "{{ messages[0].get('x', 'y') }}{{ messages[0].items() | list }}{{ (1, 2) + (3,) }}{{ [1] + [2] }}",
    "{{ 2 ** 8 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 7 / 2 }}{{ 1.26 | round(1) }}{{ '5' | int + 1 }}{{ -3 | abs }}",
    "{{ 'hello world' | title }}{{ 'x' | capitalize }}{{ ['b', 'a'] | sort | first }}{{ [1, 1] | unique | list }}",
    "{%- if tools is not defined or not tools -%}  no  {%- endif %}\n  {# note #}\n    {%- set a, b = 1, 2 %}{{ a }}{{ b }}",
    "  {% if true %}\nblock\n  {% endif %}\nend\n",
    "{{ '<a>' | safe + '<b>' }}{{ '<' | e }}{{ 'x' | safe | replace('x', '<') }}{{ ['<', 1] | join('>' | safe) }}",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_a_harmless_template_renders_as_in_jinja(source: str) -> None:
    messages = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "yo"}]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    expected = plain.from_string(source).render(messages=messages)
    assert rendered(source, messages=messages) == expected


def test_json_is_written_as_hugging_face_does() -> None:
    assert rendered("{{ x | tojson }}", x={"a": "<é>", "b": [1]}) == '{"a": "<é>", "b": [1]}'
    assert rendered("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_generation_blocks_are_plain_text() -> None:
    assert rendered("a{% generation %}b{{ x }}{% endgeneration %}c", x=1) == "ab1c"


def test_the_date_can_be_written() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d') }}").count("-") == 2


def test_a_long_chat_has_work_enough() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    source = "{% for m in messages %}{{ m.role + ': ' + m.content | trim }}{% endfor %}"
    text = render(compile_template(source), {"messages": messages}, Meter(2_000_000))
    assert len(text) == 2000 * (len("user: ") + 999)
