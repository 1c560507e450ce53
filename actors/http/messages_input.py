"""Anthropic's messages and tools → OpenAI's, which is what chat templates read.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millpond.actors.http.chat_input import checked_tools
from millpond.actors.http.forced_calls import ToolChoice, chosen_tools
from millpond.actors.http.problems import ApiError, invalid


def openai_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a chat; raises ApiError 400 naming the block that is at fault."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _text_of(system, "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", f"{where}.role: expected user or assistant")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif isinstance(content, list):
            found += _of_blocks(role, content, f"{where}.content")
        else:
            raise invalid(f"{where}.content", f"{where}.content: expected text or a list of blocks")
    return found


def openai_tools(
    tools: list[dict[str, Any]], choice: ToolChoice, tools_max: int
) -> list[dict[str, Any]]:
    """Return the tools; raises ApiError 400 for one that is no function of the client's."""
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise ApiError(
                400,
                "unsupported_parameter",
                f"tools[{index}].type: this server has no tools of its own",
                f"tools[{index}].type",
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        found.append({"type": "function", "function": function})
    return chosen_tools(checked_tools(found, tools_max), choice)


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what else the user says."""
    results, texts, calls = [], [], []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        here = f"{where}[{index}]"
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind in ("thinking", "redacted_thinking"):
            continue  # templates strip it from history
        elif kind == "tool_use" and isinstance(block.get("input"), dict):
            calls.append(_call(block))
        elif kind == "tool_result":
            content = block.get("content")
            text = _text_of(content, f"{here}.content") if content else ""
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        elif kind in ("image", "document"):
            raise ApiError(400, "unsupported_content", f"{here}: this model reads text only", here)
        else:
            raise invalid(here, f"{here}: expected a block of text, tool_use or tool_result")
    found: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        found["tool_calls"] = calls
    return [*results, found] if texts or calls or not results else results


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _text_of(content: Any, where: str) -> str:
    """Return a text, or the texts of blocks, one a line."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content if isinstance(content, list) else [None]):
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str) or block.get("type") != "text":
            raise invalid(f"{where}[{index}]", f"{where}[{index}]: expected a block of text")
        texts.append(text)
    return "\n".join(texts)
