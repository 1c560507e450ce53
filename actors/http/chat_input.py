"""The messages and tools of a chat, checked, and in the form that a model's template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from millpond.actors.http.problems import ApiError, invalid

_MEDIA = {
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "videos",
    "file": "files",
    "document": "documents",
}


def messages_for(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a template reads them; raises ApiError 400 for content that is no text.

    Templates with ``tool_responses`` (Gemma 4) want the results of tools at the turn that called
    them, and name instead of id.
    """
    for index, message in enumerate(messages):
        _check_content(message.get("content"), f"messages[{index}].content")
    if "tool_responses" not in template:
        return [dict(message) for message in messages]
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool" and found and found[-1].get("role") == "assistant":
            _add_response(found[-1], message)
        else:
            found.append(dict(message))
    return found


def checked_tools(tools: list[dict[str, Any]], tools_max: int) -> list[dict[str, Any]]:
    """Return the tools; raises ApiError 400 for one that is no function."""
    if len(tools) > tools_max:
        raise invalid("tools", f"tools: found {len(tools)}, expected at most {tools_max}")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(f"tools[{index}]", f"tools[{index}]: expected a function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{index}].function.name", f"tools[{index}]: it needs a name")
    return tools


def _check_content(content: object, where: str) -> None:
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise ApiError(
                400,
                "unsupported_content",
                f"{where}[{index}]: this model reads text, no {_MEDIA[kind]}",
                f"{where}[{index}]",
            )


def _add_response(turn: dict[str, Any], message: Mapping[str, Any]) -> None:
    calls = turn.get("tool_calls")
    names = {}
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(call.get("id"), str):
            names[call["id"]] = function.get("name")
    call_id = message.get("tool_call_id")
    name = names.get(call_id) if isinstance(call_id, str) else None
    response = {"name": name or message.get("name") or "unknown", "response": _response(message)}
    before = turn.get("tool_responses")
    turn["tool_responses"] = [*(before if isinstance(before, list) else ()), response]


def _response(message: Mapping[str, Any]) -> Any:
    """What a tool gave: an object if its text is one, else the text."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    try:
        found = msgspec.json.decode(content) if isinstance(content, str) else content
    except (msgspec.DecodeError, RecursionError):
        return content
    return found if isinstance(found, dict) else content
