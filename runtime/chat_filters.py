"""The filters and tests that a chat template may use, each charged to the meter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, cast

from jinja2 import Environment
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.runtime import Undefined
from jinja2.tests import TESTS
from millpond.runtime.chat_meter import Meter
from millpond.runtime.errors import ChatTemplateError

_FILTERS = cast("dict[str, Callable[..., Any]]", FILTERS)
_TESTS = cast("dict[str, Callable[..., Any]]", TESTS)

# Jinja's filters, by what they read of their first operand.
_OF_TEXT = ("capitalize", "e", "escape", "lower", "safe", "title", "upper")
_SHALLOW = (
    *("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length"),
    *("list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"),
)
_DEEP = ("dictsort", "groupby", "max", "min", "sort", "unique")
_COMPARING_TESTS = (
    *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan"),
    *(">", "ge", ">=", "in"),
)


def metered_filters(environment: Environment, meter: Meter) -> dict[str, Callable[..., Any]]:
    """Return name → filter, for one rendering."""
    found: dict[str, Callable[..., Any]] = {
        name: _text_filter(meter, _FILTERS[name]) for name in _OF_TEXT
    }
    found |= {name: _filter(meter.shallow, meter, _FILTERS[name]) for name in _SHALLOW}
    found |= {name: _filter(meter.listed, meter, _FILTERS[name]) for name in _DEEP}
    own = _OwnFilters(environment, meter)
    return found | {
        "format": own.format,
        "indent": own.indent,
        "join": own.join,
        "replace": own.replace,
        "round": own.round,
        "string": meter.text,
        "tojson": own.tojson,
        "trim": own.trim,
    }


def metered_tests(meter: Meter) -> dict[str, Callable[..., Any]]:
    """Return name → test; those that compare charge what they compare."""
    comparing = {name: _filter(meter.deep, meter, _TESTS[name]) for name in _COMPARING_TESTS}
    return _TESTS | comparing


class _OwnFilters:
    """Filters whose results could grow past their operands, or that Jinja writes differently."""

    def __init__(self, environment: Environment, meter: Meter) -> None:
        self._environment, self._meter = environment, meter

    def format(self, form: Any, *arguments: Any, **named: Any) -> str:
        """Return ``form % arguments``."""
        text = self._meter.text(form)
        values: Any = named or arguments
        self._meter.printf(text, values)
        result: str = text % values
        return result

    def indent(
        self,
        value: Any,
        width: int | str = 4,
        first: bool = False,
        blank: bool = False,
    ) -> str:
        """Return the text with its lines indented, as Jinja does."""
        text = self._meter.text(value)
        chars = len(width) if isinstance(width, str) else width
        self._meter.repetition("x" * len(text.splitlines()), chars)
        return do_indent(text, width, first, blank)

    def join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        """Return the texts of the items with d between them."""
        if attribute is not None:
            value = map(make_attrgetter(self._environment, attribute), value)
        return self._meter.joined(self._meter.text(d), value)

    def replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        """Return the text with old replaced, at most count times."""
        # plain str: the methods of Markup, which the safe filter makes, would escape what they add
        text, old, new = (str(self._meter.text(part)) for part in (value, old, new))
        self._meter.replacement(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def round(self, value: float, precision: int = 0, method: str = "common") -> float:
        """Return the rounded number; Jinja would raise ten to any power."""
        if abs(precision) > 30:
            raise ChatTemplateError("chat template: it rounds to too many digits")
        rounded: float = _FILTERS["round"](value, precision, method)
        return rounded

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON as Hugging Face's templates want it: nothing escaped for HTML."""
        if indent is not None and not 0 <= int(indent) <= 16:
            raise ChatTemplateError("chat template: tojson indents by too much")
        if isinstance(value, Undefined):
            raise ChatTemplateError("chat template: tojson of an undefined value")
        self._meter.text(value)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def trim(self, value: Any, chars: str | None = None) -> str:
        """Return the text without white space, or chars, around it."""
        text = self._meter.text(value)
        self._meter.search(text, (chars,))
        return text.strip(chars)


def _text_filter(meter: Meter, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filtered(value: Any, *args: Any, **named: Any) -> Any:
        return meter.shallow(function(meter.text(value), *args, **named))

    return filtered


def _filter(
    charged: Callable[[Any], Any], meter: Meter, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a filter or test: its operands are charged before, its result after."""

    @wraps(function)
    def filtered(*args: Any, **named: Any) -> Any:
        meter.charge(1)
        return meter.shallow(function(*map(charged, args), **named))

    return filtered
