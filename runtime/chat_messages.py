"""The messages of a chat, checked and brought into the form that a template reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from millpond.runtime.errors import InvalidParameter

MESSAGES_MAX = 10_000
"""Messages of one chat; agents come to some hundreds."""

VALUES_MAX = 100_000
"""Values within tools, tool calls and variables; a large set of tools has some thousands."""

DEPTH_MAX = 32
"""Levels of lists and objects within those; JSON schemas come to about ten."""

ContentForm = Literal["text", "parts", "both"]
"""Whether a template reads a content as text, as a list of text parts, or as either."""

_ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function")
_OTHER_KEYS = ("name", "tool_calls", "tool_call_id", "tool_responses", "reasoning_content")


def checked_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return new messages with a known role, a content of text and the keys that templates read.

    Content is a str, a list of ``{"type": "text", "text": …}`` (returned as list of str), or, for
    None, ``""``.  Arguments of tool calls that are JSON text become what the text says.  Other keys
    are dropped.  Raises InvalidParameter that names the message.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidParameter(f"messages: found {type(messages).__name__}, expected a list")
    if not 1 <= len(messages) <= MESSAGES_MAX:
        raise InvalidParameter(f"messages: found {len(messages)}, expected 1 to {MESSAGES_MAX}")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def in_form(content: str | list[str], form: ContentForm) -> str | list[dict[str, str]]:
    """Return a content as the template reads it; text parts are joined by newlines."""
    if isinstance(content, str):
        return content if form != "parts" else [{"type": "text", "text": content}]
    if form == "text" or (len(content) < 2 and form == "both"):
        return "\n".join(content)
    return [{"type": "text", "text": text} for text in content]


def checked_values(value: object, name: str) -> Any:
    """Return a copy of plain JSON data; raises InvalidParameter for anything else, or too much."""
    left = VALUES_MAX

    def copied(found: object, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > DEPTH_MAX:
            raise InvalidParameter(
                f"{name}: expected at most {VALUES_MAX} values in {DEPTH_MAX} levels"
            )
        if found is None or isinstance(found, (str, bool, int, float)):
            return found
        if isinstance(found, Mapping):
            return {_key(key, name): copied(item, depth + 1) for key, item in found.items()}
        if isinstance(found, (list, tuple)):
            return [copied(item, depth + 1) for item in found]
        raise InvalidParameter(f"{name}: found {type(found).__name__}, expected JSON values")

    return copied(value, 0)


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text of plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def _checked(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(f"{name}: found {type(message).__name__}, expected an object")
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidParameter(
            f"{name}.role: found {role!r:.80}, expected one of {', '.join(_ROLES)}"
        )
    checked: dict[str, Any] = {
        "role": role,
        "content": _content(message.get("content"), f"{name}.content"),
    }
    for key in _OTHER_KEYS:
        if message.get(key) is not None:
            checked[key] = checked_values(message[key], f"{name}.{key}")
    _parse_arguments(checked.get("tool_calls"))
    return checked


def _content(content: object, name: str) -> str | list[str]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or len(content) > MESSAGES_MAX:
        raise InvalidParameter(
            f"{name}: found {type(content).__name__}, expected text or a list of text parts"
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text, str):
            raise InvalidParameter(
                f'{name}[{index}]: expected a text part, {{"type": "text", "text": ...}}'
            )
        texts.append(text)
    return texts


def _parse_arguments(tool_calls: Any) -> None:
    """Replace JSON text by the object that it spells: templates expect the latter."""
    for call in tool_calls if isinstance(tool_calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue  # the template gets the text
            if isinstance(arguments, dict):
                function["arguments"] = checked_values(arguments, "tool call arguments")


def _key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise InvalidParameter(f"{name}: found a key {key!r:.80}, expected text")
    return key
