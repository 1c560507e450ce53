"""JSON schema → the rules of Gemma 4's arguments: ``{key:value}``, strings between marks.  Pure.

Held to: names and order of keys, which of them are required, types, ``enum`` and ``const``,
``anyOf`` and ``oneOf``, and references within the schema.  Bounds of values are not.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, NamedTuple

import msgspec
from millpond.actors.http.forced_text import DEPTH_MAX, Mark, literal, mark_rule

_BARE_KEY = re.compile(r"[^,:{}\[\]<\s][^,:{}\[\]<]*(?<!\s)")
_ANY_DEPTH = 4
"""Levels of a value that the schema says nothing about; the reader takes 32."""
_SCALARS = {
    "integer": "GINTEGER",
    "number": "GNUMBER",
    "boolean": "GBOOLEAN",
    "null": '"null"',
}


class _Pairs(NamedTuple):
    """Pairs of key and value that follow each other, at least one of those that they may be.

    first, later  rules without and with a comma before each
    can_miss      all of them may be missing
    """

    first: str
    later: str
    can_miss: bool


class GemmaRules:
    """The rules of one function's arguments; ``prefix`` keeps their names apart from others'.

    lines  the rules that ``arguments`` needs, beside ``shared``
    """

    shared: ClassVar[tuple[str, ...]] = (
        r"GINTEGER: /-?(0|[1-9][0-9]{0,15})/",
        r"GNUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][-+]?[0-9]{1,2})?/",
        "GBOOLEAN: /true|false/",
        r'GTEXT: /(.|\n)*/ & ~/(.|\n)*<\|"\|>(.|\n)*/',
        r'GSTRING: "<|\"|>" GTEXT "<|\"|>"',
        r"GKEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    )

    def __init__(self, prefix: str, quote: Mark, schema: dict[str, Any]) -> None:
        self._prefix, self._quote, self._schema = prefix, mark_rule(quote), schema
        self._quote_text = quote.text
        # as text the mark must end the same terminal: whatever is text would take its beginning
        is_text = quote.token_id is None
        self._string = "GSTRING" if is_text else f"{self._quote} GTEXT {self._quote}"
        # mutable state, changed only while rules are made
        self.lines: list[str] = []
        self._references: dict[str, str] = {}
        self._any: str = ""

    def arguments(self) -> str:
        """Return the name of the rule of the whole arguments."""
        return self._object(self._schema, 0)

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any, depth: int) -> str:
        """Return what stands for a value in a rule."""
        if not isinstance(schema, dict) or depth > DEPTH_MAX:
            return self._anything()
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], depth)
        for key in ("const", "enum"):
            if key in schema:
                found = [schema[key]] if key == "const" else schema[key]
                return self._constants(found if isinstance(found, list) else [])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._either([self._value(one, depth + 1) for one in schema[key]])
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._either([self._value(schema | {"type": one}, depth + 1) for one in kinds])
        return self._of_type(kinds, schema, depth)

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string
        if kind == "array":
            item = self._rule(self._value(schema.get("items"), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        scalar = _SCALARS.get(kind) if isinstance(kind, str) else None
        return scalar or self._anything()

    def _either(self, ways: list[str]) -> str:
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _reference(self, target: str, depth: int) -> str:
        """A schema elsewhere in this one; it may hold itself."""
        if target in self._references:
            return self._references[target]
        found: Any = self._schema
        for part in target.split("/")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        name = f"{self._prefix}r{len(self._references)}"
        self._references[target] = name
        body = self._value(found, depth + 1)
        self.lines.append(f"{name}: {body}")
        return name

    def _constants(self, values: list[Any]) -> str:
        ways = []
        for value in values:
            if isinstance(value, str) and self._quote_text not in value:
                ways.append(
                    f"{self._quote} {literal(value)} {self._quote}"
                    if value
                    else f"{self._quote} {self._quote}"
                )
            elif value is None or isinstance(value, bool | int | float):
                ways.append(literal(msgspec.json.encode(value).decode()))
        return self._either(ways) if ways else self._anything()

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        """Keys in the order of the schema; a comma stands between those that are there."""
        found = schema.get("properties")
        properties = list(found.items()) if isinstance(found, dict) else []
        if not properties:
            is_closed = schema.get("additionalProperties") is False
            return self._rule('"{" "}"' if is_closed else self._any_object())
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        pairs = []
        for key, value in properties:
            pair = self._rule(f'{self._key(key)} ":" {self._value(value, depth + 1)}')
            is_needed = key in needed
            pairs.append(_Pairs(pair, self._rule(f'"," {pair}'), not is_needed))
        every = self._joined(pairs)
        return self._rule('"{" ' + every.first + (' "}" | "{" "}"' if every.can_miss else ' "}"'))

    def _joined(self, pairs: list[_Pairs]) -> _Pairs:
        """Halves in halves: a chain of rules would be as deep as there are pairs."""
        if len(pairs) == 1:
            return pairs[0]
        middle = len(pairs) // 2
        left, right = self._joined(pairs[:middle]), self._joined(pairs[middle:])
        after = f"{right.later}?" if right.can_miss else right.later
        first = f"{left.first} {after}" + (f" | {right.first}" if left.can_miss else "")
        later = f"{left.later} {after}" + (f" | {right.later}" if left.can_miss else "")
        return _Pairs(self._rule(first), self._rule(later), left.can_miss and right.can_miss)

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return literal(key)
        return f"{self._quote} {literal(key)} {self._quote}"

    def _anything(self) -> str:
        """Any value, down to some depth."""
        if not self._any:
            scalar = f'GNUMBER | GBOOLEAN | "null" | {self._string}'
            name = self._rule(scalar)
            for _ in range(_ANY_DEPTH):
                pairs = f'"{{" (GKEY ":" {name} ("," GKEY ":" {name})*)? "}}"'
                name = self._rule(f'{scalar} | "[" ({name} ("," {name})*)? "]" | {pairs}')
            self._any = name
        return self._any

    def _any_object(self) -> str:
        value = self._anything()
        return f'"{{" (GKEY ":" {value} ("," GKEY ":" {value})*)? "}}"'
