"""``response_format``: the form that a request wants → the text of a JSON schema.  Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from millpond.actors.http.problems import invalid, unsupported

_ANY_OBJECT = '{"type":"object"}'


def schema_of(found: dict[str, Any] | None, has_tools: bool) -> str:
    """Return the schema that OpenAI's ``response_format`` asks for, "" for none.

    Raises ApiError 400 for what is no format, and for one beside tools: an answer that is held to
    a schema could call none of them.
    """
    if found is None:
        return ""
    kind = found.get("type")
    if kind == "text":
        return ""
    if kind not in ("json_object", "json_schema"):
        raise invalid(
            "response_format", "response_format.type: expected text, json_object or json_schema"
        )
    if has_tools:
        raise unsupported("response_format", "it cannot be had together with tools")
    if kind == "json_object":
        return _ANY_OBJECT
    inner = found.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    return _text_of(schema, "response_format.json_schema.schema")


def anthropic_schema_of(
    format_: dict[str, Any] | None, config: dict[str, Any] | None, has_tools: bool
) -> str:
    """Return the schema that Anthropic's ``output_format`` or ``output_config.format`` asks for.

    Raises ApiError 400.
    """
    found = format_ if format_ is not None else (config or {}).get("format")
    if found is None:
        return ""
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        raise invalid("output_format", "output_format.type: expected json_schema")
    if has_tools:
        raise unsupported("output_format", "it cannot be had together with tools")
    return _text_of(found.get("schema"), "output_format.schema")


def _text_of(schema: Any, where: str) -> str:
    if not isinstance(schema, dict):
        raise invalid(where, f"{where}: expected a JSON schema, an object")
    return msgspec.json.encode(schema).decode()
