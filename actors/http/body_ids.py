"""Long lists of token ids in a body, taken out of it and read without an object for each.  Pure.

A decoder would hold the interpreter's lock for a tenth of a second over a million ids.  Here they
are found and read in slices by array operations, which leave the lock to others: call it on a
thread.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from millpond.actors.http.body_values import outside_strings

LONG_BYTES = 2**15
"""A list that takes more is taken out; a shorter one decodes in a fraction of a millisecond."""
SLICE_BYTES = 2**18
DIGITS_MAX = 10
ID_MAX = 2**32 - 1
_SPACE = b" \t\n\r"


@dataclass(frozen=True, slots=True)
class Taken:
    """A body without its long lists.

    short   the body, where each of them is ``[mark]``
    lists   mark → ids
    """

    short: bytes
    lists: dict[int, array[int]]

    def filled(self, found: Any) -> Any:
        """Return a value with the lists where their marks are: a list of ids, or of such lists."""
        if not isinstance(found, list):
            return found
        if len(found) == 1 and isinstance(found[0], int):
            return self.lists.get(found[0], found)
        return [self.filled(one) for one in found] if len(found) <= len(self.lists) else found


def take_lists(data: bytes) -> Taken:
    """Take long lists of ids out of JSON; what only looks like one stays."""
    parts: list[bytes] = []
    lists: dict[int, array[int]] = {}
    end = 0
    for start, stop in _long_lists(data):
        ids = ids_of(data[start:stop])
        if ids is None:
            continue
        mark = _mark(data, lists)
        parts += [data[end:start], b"%d" % mark]
        lists[mark], end = ids, stop
    return Taken(b"".join([*parts, data[end:]]), lists)


def ids_of(text: bytes) -> array[int] | None:
    """Return decimal numbers between commas, each below 2^32; None if that is not all there is."""
    found, start = array("I"), 0
    while start >= 0:  # behind every comma there must be a number
        comma = text.find(b",", start + SLICE_BYTES)
        numbers = _numbers(text[start : comma if comma >= 0 else len(text)])
        if numbers is None:
            return None
        found.frombytes(numbers.tobytes())
        start = comma + 1 if comma >= 0 else -1
    return found


def _mark(data: bytes, lists: dict[int, array[int]]) -> int:
    """Return an id that does not stand in the body."""
    while True:
        mark = secrets.randbelow(ID_MAX)
        if mark not in lists and b"%d" % mark not in data:
            return mark


def _long_lists(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where lists of nothing but numbers begin and end, their brackets apart."""
    first, before, opens = 0, -1, False  # the last letter that is in no list of numbers
    for outside, letters in outside_strings(data):
        is_digit = (letters >= ord("0")) & (letters <= ord("9"))
        places = np.flatnonzero(~(is_digit | (letters == ord(",")) | _is_space(letters)))
        if len(places):
            is_open = outside[places] & (letters[places] == ord("["))
            starts = np.concatenate(([before], places[:-1] + first))
            can_open = np.concatenate(([opens], is_open[:-1]))
            is_long = (places + first - starts > LONG_BYTES) & can_open
            for place in np.flatnonzero(is_long & (letters[places] == ord("]"))):
                yield int(starts[place]) + 1, int(places[place]) + first
            before, opens = int(places[-1]) + first, bool(is_open[-1])
        first += len(letters)


def _numbers(text: bytes) -> Any:
    """Return decimal numbers between commas, (n,) uint32, or None."""
    letters: Any = np.frombuffer(text, dtype=np.uint8)
    is_digit = (letters >= ord("0")) & (letters <= ord("9"))
    is_comma = letters == ord(",")
    edges = np.diff(np.concatenate(([0], is_digit.view(np.int8), [0])))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    commas = np.flatnonzero(is_comma)
    if len(starts) != len(commas) + 1 or not np.all(is_digit | is_comma | _is_space(letters)):
        return None
    # one number before each comma, and one behind the last
    if np.any(ends[:-1] > commas) or np.any(starts[1:] < commas):
        return None
    lengths = ends - starts
    if lengths.max() > DIGITS_MAX or np.any((lengths > 1) & (letters[starts] == ord("0"))):
        return None
    values: Any = np.zeros(len(starts), dtype=np.int64)
    for place in range(int(lengths.max())):
        digits = letters[np.maximum(ends - 1 - place, 0)].astype(np.int64) - ord("0")
        values += np.where(lengths > place, digits * 10**place, 0)
    return values.astype(np.uint32) if values.max() <= ID_MAX else None


def _is_space(letters: Any) -> Any:
    return np.isin(letters, np.frombuffer(_SPACE, dtype=np.uint8))
