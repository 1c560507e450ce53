"""Pieces of the grammars of forced calls: texts, marks, and schemas without their notes.  Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from millpond.actors.http.problems import invalid
from millpond.runtime.errors import InvalidParameter
from millpond.runtime.guidance import check_references

DEPTH_MAX = 24
"""Levels of a tool's schema, of three or four brackets each; those of real tools have some five."""
_NOTES = frozenset(("title", "description", "default", "examples", "$comment", "x-guidance"))
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_OPEN_ENDED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of a template; ``token_id`` of a control token, None if it is written as text."""

    text: str
    token_id: int | None


def literal(text: str) -> str:
    """Return the terminal that is one text."""
    return json.dumps(text, ensure_ascii=False)


def mark_rule(mark: Mark) -> str:
    """Return what stands for a mark in a rule."""
    return f"<[{mark.token_id}]>" if mark.token_id is not None else literal(mark.text)


def bare_schema(found: Any, where: str) -> dict[str, Any]:
    """Return the schema of a function's arguments without what only people and models read.

    Arguments that it does not name are left out, unless it allows them itself; no schema is one
    without arguments.  Raises ApiError 400 for one that is none of an object, or too deep.
    """
    if found is None:
        found = {"type": "object", "properties": {}}
    if not isinstance(found, dict) or found.get("type", "object") != "object":
        raise invalid(where, f"{where}: expected the JSON schema of an object")
    schema: dict[str, Any] = _bare(found, where, 0) | {"type": "object"}
    try:
        check_references(schema)
    except InvalidParameter as error:
        raise invalid(where, str(error).replace("json_schema", where)) from None
    if "properties" in schema and not _OPEN_ENDED & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def _bare(found: Any, where: str, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise invalid(where, f"{where}: found more than {DEPTH_MAX} levels")
    if isinstance(found, list):
        return [_bare(one, where, depth + 1) for one in found]
    if not isinstance(found, dict):
        return found
    schema = {}
    for key, value in found.items():
        if key in _BY_NAME and isinstance(value, dict):
            named = {name: _bare(one, where, depth + 1) for name, one in value.items()}
            schema[key] = named
        elif key in ("enum", "const"):
            schema[key] = value
        elif key not in _NOTES:
            schema[key] = _bare(value, where, depth + 1)
    return schema
