"""Which characters of a rendered chat came from its users.

A mark is a character that occurs nowhere else; it says that the character before it is user text.
The characters that a control token can begin or end with are marked wherever users wrote one.  Then
the template is rendered, the marks are taken out, and what they say holds for the plain text.
A control token that users wrote, whole or in parts that a template puts together, thus has a marked
character and is not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from millpond.runtime.errors import InvalidParameter

# The private-use planes; noncharacters at the end of each plane are left out.
_MARKS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class Marks:
    """Marks user text for one rendering."""

    def __init__(self, control_texts: Iterable[str], texts: Iterable[str]) -> None:
        """Take the control tokens' texts, and every text in which no mark may occur already.

        Raises InvalidParameter if the texts use every character of the private-use planes.
        """
        controls = [text for text in control_texts if text]
        used: set[str] = set().union(*texts)
        mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
        if mark is None:
            raise InvalidParameter("messages: they use every private-use character")
        self._mark = mark
        ends = "".join(sorted({re.escape(end) for text in controls for end in (text[0], text[-1])}))
        self._ends = re.compile(f"[{ends}]") if ends else None
        self._controls = "\0".join(controls)
        # mutable state, changed only in text
        self.count = 0

    def marked(self, value: Any) -> Any:
        """Return plain data with the marks in all its texts and keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            # short keys are those of a schema, by which the template looks values up
            return {self._with_ends(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        return value

    def text(self, text: str) -> str:
        """Return a text with the marks in it."""
        inner = text.strip()
        if inner and inner in self._controls:
            # the template may write both ends itself: "<" ~ name ~ ">"
            self.count += 1
            return "".join(char if char.isspace() else char + self._mark for char in text)
        return self._with_ends(text)

    def unmarked(self, text: str) -> tuple[str, list[int]]:
        """Return a rendered text without marks, and the growing indexes of marked characters."""
        plain = text.split(self._mark)
        return "".join(plain), list(self._tainted(plain))

    def _with_ends(self, text: str) -> str:
        if self._ends is None:
            return text
        marked, count = self._ends.subn(rf"\g<0>{self._mark}", text)
        self.count += count
        return marked

    def _tainted(self, plain: list[str]) -> Iterator[int]:
        length, last = 0, -1
        for part in plain[:-1]:
            length += len(part)
            if length - 1 > last:
                last = length - 1
                yield last
