"""Tool calls as models write them → name and JSON arguments.  Pure and bounded; text is untrusted.

Forms: Gemma 4 (``call:name{key:value}``, strings between ``<|"|>``), and JSON objects with ``name``
and ``arguments`` or ``parameters``, alone or in a list (Hermes, Qwen, Mistral, Llama).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

QUOTE = '<|"|>'
DEPTH_MAX = 32
"""Levels of objects and lists in arguments; more is no call."""
CALLS_MAX = 128
"""Calls in one list; agents make some ten."""
CALL_NAME = re.compile(r"[\w.:-]{1,128}")
_BARE = re.compile(r"[^,:{}\[\]<\s][^,:{}\[\]<]*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


def gemma_call(text: str) -> ToolCall | None:
    """Return the call that stands between Gemma 4's tool call tokens, None if it is none."""
    head, brace, rest = text.strip().partition("{")
    name = head.removeprefix("call:").strip()
    if not brace or not head.startswith("call:") or not CALL_NAME.fullmatch(name):
        return None
    reader = _GemmaReader("{" + rest)
    try:
        arguments = reader.value(0)
    except ValueError:
        return None
    if reader.rest().strip() or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def json_calls(text: str) -> list[ToolCall]:
    """Return the calls of a JSON object or list, [] if it is anything else."""
    try:
        found = msgspec.json.decode(text.strip().encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return []
    listed = found if isinstance(found, list) else [found]
    calls = [_json_call(one) for one in listed[:CALLS_MAX]]
    return [call for call in calls if call is not None] if all(calls) else []


def _json_call(found: Any) -> ToolCall | None:
    if not isinstance(found, dict):
        return None
    inner = found.get("function")
    found = inner if isinstance(inner, dict) else found
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return None
    if (
        not isinstance(name, str)
        or not CALL_NAME.fullmatch(name)
        or not isinstance(arguments, dict)
    ):
        return None
    return ToolCall(name, msgspec.json.encode(arguments).decode())


class _GemmaReader:
    """A recursive reader of Gemma 4's arguments; raises ValueError for what is none."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rest(self) -> str:
        """Return what was not read."""
        return self._text[self._at :]

    def value(self, depth: int) -> Any:
        """Read one value."""
        if depth > DEPTH_MAX:
            raise ValueError("too deep")
        self._skip()
        if self._take(QUOTE):
            return self._string()
        if self._take("{"):
            return dict(self._items("}", depth, self._pair))
        if self._take("["):
            return self._items("]", depth, self.value)
        return self._scalar()

    def _items(self, end: str, depth: int, read: Any) -> list[Any]:
        found: list[Any] = []
        self._skip()
        if self._take(end):
            return found
        while True:
            found.append(read(depth + 1))
            self._skip()
            if self._take(end):
                return found
            if not self._take(","):
                raise ValueError(f"expected , or {end}")

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip()
        key = self._string() if self._take(QUOTE) else self._bare()
        self._skip()
        if not self._take(":"):
            raise ValueError("expected :")
        return key, self.value(depth)

    def _string(self) -> str:
        end = self._text.find(QUOTE, self._at)
        if end < 0:
            raise ValueError("a string without its end")
        found, self._at = self._text[self._at : end], end + len(QUOTE)
        return found

    def _bare(self) -> str:
        match = _BARE.match(self._text, self._at)
        if match is None:
            raise ValueError("expected a word")
        self._at = match.end()
        return match[0].strip()

    def _scalar(self) -> Any:
        word = self._bare()
        try:
            return msgspec.json.decode(word.encode("utf-8", "replace"))
        except msgspec.DecodeError:
            return word

    def _take(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
