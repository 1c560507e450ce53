"""What a model's turn consists of: content, reasoning, tool calls.  Pure; token by token.

Which marks a model uses is read off its chat template.  Text that may be the beginning of a mark is
held back until it is known not to be one; a call that is no call after all is content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from millpond.actors.http.tool_calls import ToolCall, gemma_call, json_calls
from millpond.runtime.results import StreamedToken

Kind = Literal["content", "reasoning", "call"]
CALL_CHARACTERS_MAX = 2**18
"""Longest text of one call; a file that an agent writes has some ten thousand characters."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a turn between two marks; an empty ``end`` is the end of the turn.

    start, end  marks, the names of control tokens or plain text
    kind        reasoning or call
    drop        what may follow the start and belongs to the mark
    """

    start: str
    end: str
    kind: Kind
    drop: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a turn; a call has its name, and its JSON arguments as text."""

    kind: Kind
    text: str
    name: str = ""


GEMMA_CALL = Region("<|tool_call>", "<tool_call|>", "call")
GEMMA_THOUGHT = Region("<|channel>", "<channel|>", "reasoning", "thought\n")
HERMES_CALL = Region("<tool_call>", "</tool_call>", "call")
MISTRAL_CALLS = Region("[TOOL_CALLS]", "", "call")
LLAMA_CALL = Region("<|python_tag|>", "", "call")
THINK = Region("<think>", "</think>", "reasoning", "\n")
_REGIONS = (GEMMA_CALL, GEMMA_THOUGHT, HERMES_CALL, MISTRAL_CALLS, LLAMA_CALL, THINK)


def knows_tools(template: str) -> bool:
    """Tell whether a chat template shows tools to its model."""
    return "tools" in template


def regions_of(template: str, with_tools: bool) -> tuple[Region, ...]:
    """Return the regions that a template's model writes; calls only where tools were given."""
    found = [one for one in _REGIONS if one.start in template]
    return tuple(one for one in found if with_tools or one.kind != "call")


class TurnReader:
    """Reads one turn; ``special_text`` names control tokens, which have no text of their own."""

    def __init__(
        self, regions: tuple[Region, ...], special_text: Callable[[int], str], bare_json: bool
    ) -> None:
        """Read from the beginning of a turn.

        bare_json  a turn that is nothing but JSON of calls is calls (models without marks)
        """
        self._regions, self._special_text = regions, special_text
        self._marks = frozenset(mark for one in regions for mark in (one.start, one.end) if mark)
        self._bare_json = bare_json
        # mutable state, changed only in push and finish
        self._index = -1
        self._held = ""
        self._inside: Region | None = None
        self._fresh = False  # nothing of the region was given out yet
        self._blank = True  # nothing but white space came so far
        self.calls = 0

    def push(self, token: StreamedToken) -> list[Segment]:
        """Return what became known with a token."""
        text = token.text
        if token.index > self._index and self._regions:
            name = self._special_text(token.token_id)
            text = text + name if name in self._marks or self._quotes(name) else text
        self._index = max(self._index, token.index)
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[Segment]:
        """Return what was held back; a call that never came is content."""
        found = self._read(final=True)
        if self._inside is not None and self._inside.kind == "call":
            found.append(Segment("content", self._inside.start))
        return found

    def _quotes(self, name: str) -> bool:
        return self._inside is GEMMA_CALL and bool(name)

    def _read(self, final: bool) -> list[Segment]:
        found: list[Segment] = []
        while self._held:
            before = self._held
            found += self._inner(final) if self._inside else self._outer(final)
            if self._held == before:
                break
        return [one for one in found if one.text or one.kind == "call"]

    def _outer(self, final: bool) -> list[Segment]:
        """Outside of regions: content up to the first mark."""
        if self._bare_json and self._blank:
            self._held = self._held.lstrip()
            if self._held.startswith(("{", "[")):
                if not final and len(self._held) <= CALL_CHARACTERS_MAX:
                    return []
                calls, self._blank = json_calls(self._held), False
                if calls:
                    self._held = ""
                    return self._called(calls)
        at, region = self._first_start()
        if region is not None:
            text, self._held = self._held[:at], self._held[at + len(region.start) :]
            self._inside, self._fresh = region, True
            return [self._content(text)]
        keep = 0 if final else _may_begin(self._held, [one.start for one in self._regions])
        text, self._held = self._cut(keep)
        return [self._content(text)]

    def _first_start(self) -> tuple[int, Region | None]:
        found = [(self._held.find(one.start), one) for one in self._regions]
        found = [pair for pair in found if pair[0] >= 0]
        return min(found, key=lambda pair: pair[0]) if found else (-1, None)

    def _content(self, text: str) -> Segment:
        self._blank = self._blank and not text.strip()
        return Segment("content", text)

    def _inner(self, final: bool) -> list[Segment]:
        assert self._inside is not None
        region = self._inside
        at = self._held.find(region.end) if region.end else -1
        if at < 0 and region.kind == "reasoning":
            return self._reasoning(region, final)
        if at < 0 and not final and len(self._held) <= CALL_CHARACTERS_MAX:
            return []
        whole = self._held if at < 0 else self._held[:at]
        self._held = "" if at < 0 else self._held[at + len(region.end) :]
        self._inside = None
        if region.kind == "reasoning":
            return [Segment("reasoning", self._dropped(region, whole))]
        calls = _calls(region, whole)
        if calls:
            return self._called(calls)
        return [Segment("content", region.start + whole + (region.end if at >= 0 else ""))]

    def _reasoning(self, region: Region, final: bool) -> list[Segment]:
        if self._fresh and not final and region.drop.startswith(self._held):
            return []
        keep = 0 if final else _may_begin(self._held, [region.end])
        text, self._held = self._cut(keep)
        text, self._fresh = self._dropped(region, text), False
        return [Segment("reasoning", text)]

    def _dropped(self, region: Region, text: str) -> str:
        return text.removeprefix(region.drop) if self._fresh else text

    def _called(self, calls: list[ToolCall]) -> list[Segment]:
        self.calls += len(calls)
        return [Segment("call", call.arguments, call.name) for call in calls]

    def _cut(self, keep: int) -> tuple[str, str]:
        place = len(self._held) - keep
        return self._held[:place], self._held[place:]


def _calls(region: Region, text: str) -> list[ToolCall]:
    if region is GEMMA_CALL:
        call = gemma_call(text)
        return [call] if call is not None else []
    return json_calls(text)


def _may_begin(text: str, marks: list[str]) -> int:
    """Return the length of the longest end of ``text`` that begins a mark."""
    longest = max(map(len, marks), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in marks):
            return count
    return 0
