"""What a chat template may cost, counted while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2.runtime import Undefined
from millpond.runtime.errors import ChatTemplateError

WORK_UNITS = 2**23
"""Units of a rendering beside those of its input: turns of a loop, or CHARS_OF_UNIT characters."""

CHARS_OF_UNIT = 4
"""Characters that count as one turn, so that no text is longer than 32 million characters."""

CPU_S_MAX = 2.0
"""Seconds of this thread's processor time; a large chat takes some 0.02."""

_UNITS_OF_LOOK = 64
_ARGUMENT_CHARS = 1024
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})")
_NUMBERS = (bool, int, float)


class Meter:
    """Counts one rendering's work, on one thread; over the bound every charge raises.

    Shallow: by the length of a value.  Deep: by all that it holds; a list that holds one list many
    times (``l = [l, l]``) counts it each time, as whoever reads it through would.
    """

    def __init__(self, input_chars: int, cpu_s_max: float = CPU_S_MAX) -> None:
        """Take the characters of messages, tools and variables: a long input has more work."""
        self._units_max = WORK_UNITS + input_chars
        self._deadline_s = time.thread_time() + cpu_s_max
        self._cpu_s_max = cpu_s_max
        # mutable state, changed only in charge
        self._units = self._looked = 0

    def charge(self, units: int) -> None:
        """Count work that is about to be done; raises ChatTemplateError over the bound."""
        self._units += units
        if self._units > self._units_max:
            raise ChatTemplateError("chat template: it loops too often or writes too much")
        if self._units - self._looked >= _UNITS_OF_LOOK:
            self._looked = self._units
            if time.thread_time() > self._deadline_s:
                raise ChatTemplateError(
                    f"chat template: not done after {self._cpu_s_max:g} s of processor time"
                )

    def shallow(self, value: Any) -> Any:
        """Charge a value by its length, and return it."""
        if isinstance(value, str):
            self.charge(1 + len(value) // CHARS_OF_UNIT)
        elif isinstance(value, (list, tuple, dict, range)):
            self.charge(1 + len(value))
        return value

    def deep(self, value: Any) -> Any:
        """Charge a value by all that it holds, and return it."""
        if isinstance(value, (list, tuple, dict)):
            for _ in self._leaves(value):
                pass
            return value
        return self.shallow(value)

    def text(self, value: Any) -> str:
        """Return the text of plain data, charged deep; raises ChatTemplateError for other things.

        Plain are text, numbers, None, undefined, ranges, and lists and dicts of these.
        """
        if isinstance(value, str):
            self.shallow(value)
            return value
        for leaf in self._leaves(value):
            if not (leaf is None or isinstance(leaf, (str, range, Undefined, *_NUMBERS))):
                raise ChatTemplateError(f"chat template: it writes a {type(leaf).__name__} as text")
        return str(value)

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, each for a charge."""
        for item in items:
            self.charge(1)
            yield item

    def listed(self, items: Any) -> Any:
        """Return lazy items as a list, and anything else as it is; charged deep."""
        lazy = isinstance(items, Iterator)
        return self.deep([self.deep(item) for item in items] if lazy else items)

    def joined(self, separator: str, items: Iterable[Any]) -> str:
        """Return the texts of items joined, after charging the result."""
        texts = []
        for item in items:
            self.charge(1 + len(separator) // CHARS_OF_UNIT)
            texts.append(self.text(item))
        return str.join(separator, texts)  # of str itself: Markup's would escape the texts

    def search(self, text: str, arguments: Iterable[Any]) -> None:
        """Charge a method of a text; some take the product of both lengths for a long argument."""
        longest = max((len(found) for found in arguments if isinstance(found, str)), default=0)
        self.charge((1 + len(text) // CHARS_OF_UNIT) * (1 + longest // _ARGUMENT_CHARS))

    def replacement(self, text: str, old: str, new: str) -> None:
        """Charge what a replacement makes: every occurrence of old, replaced."""
        self.search(text, (old,))
        self.charge(text.count(old) * len(new) // CHARS_OF_UNIT)

    def repetition(self, left: Any, right: Any) -> None:
        """Charge ``text * count``; raises ChatTemplateError for a list, nobody repeats one."""
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str) and isinstance(count, int):
                self.charge(max(count, 0) * len(value) // CHARS_OF_UNIT)
            elif isinstance(value, (list, tuple)):
                raise ChatTemplateError("chat template: it multiplies a list")

    def printf(self, form: str, arguments: Any) -> None:
        """Charge ``form % arguments``; raises ChatTemplateError for huge or computed widths."""
        if _WIDE.search(form):
            raise ChatTemplateError("chat template: a % format asks for too wide a field")
        fields = form.count("%")
        self.charge(1 + (len(form) + fields * (999 + len(self.text(arguments)))) // CHARS_OF_UNIT)

    def _leaves(self, value: Any) -> Iterator[Any]:
        """Yield all that is in a value and holds nothing itself, each for a charge."""
        waiting = [value]
        while waiting:
            found = waiting.pop()
            self.charge(1)
            if isinstance(found, dict):
                self.charge(len(found))
                waiting += found.keys()
                waiting += found.values()
            elif isinstance(found, (list, tuple)):
                self.charge(len(found))
                waiting += found
            else:
                if isinstance(found, str):
                    self.charge(len(found) // CHARS_OF_UNIT)
                yield found
