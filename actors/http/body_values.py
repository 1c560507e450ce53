"""How many values a body has, counted before anything is made of them.  Pure.

Bodies are taken in slices, by array operations that leave the interpreter's lock to others: call it
on a thread.  Time is linear in the bytes, memory a few slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from millpond.actors.http.problems import ApiError

VALUES_MAX = 2**20 + 2**16
"""Values of a body, about: a million token ids fit."""
OBJECTS_MAX = 2**18
"""Values that become objects of the interpreter, ids in long lists apart: 10,000 messages fit."""
CONTAINERS_MAX = 50_000
"""Lists and objects of a body: 10,000 messages, and 512 tools, fit."""
SLICE_BYTES = 2**18


def check_values(data: bytes) -> None:
    """Raise ApiError 413 for more values than any request has use for.

    Decoding them would hold up everybody: objects cost far more time than bytes.
    """
    values = containers = 0
    for outside, letters in outside_strings(data):
        values += int(np.count_nonzero(outside & (letters == ord(","))))
        opened = (letters == ord("[")) | (letters == ord("{"))
        containers += int(np.count_nonzero(outside & opened))
    if values > VALUES_MAX or containers > CONTAINERS_MAX:
        raise _too_complex(values, VALUES_MAX, f" in {containers} lists and objects")


def check_objects(data: bytes) -> None:
    """Raise ApiError 413 for more values than may become objects."""
    counts = (np.count_nonzero(out & (found == ord(","))) for out, found in outside_strings(data))
    values = int(sum(counts))
    if values > OBJECTS_MAX:
        raise _too_complex(values, OBJECTS_MAX, " beside token ids")


def _too_complex(found: int, bound: int, where: str) -> ApiError:
    return ApiError(
        413,
        "body_too_complex",
        f"the body has {found} values{where}, expected at most {bound} in {CONTAINERS_MAX} lists "
        "and objects",
    )


def outside_strings(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Yield slices: which letters are outside of strings, (n,) bool, and the letters, (n,) uint8.

    A quote behind an odd count of backslashes is no end of a string.
    """
    whole: Any = np.frombuffer(data, dtype=np.uint8)
    inside, run = False, 0  # at the slice's start: in a string; backslashes just before it
    for first in range(0, len(whole), SLICE_BYTES):
        letters = whole[first : first + SLICE_BYTES]
        places = np.arange(len(letters), dtype=np.int32)
        is_slash = letters == ord("\\")
        # the last letter before each place that is no backslash; -1 - run: before the slice
        last = np.maximum.accumulate(np.where(is_slash, -1 - run, places))
        before = np.concatenate(([-1 - run], last[:-1]))
        quotes = (letters == ord('"')) & ((places - 1 - before) % 2 == 0)
        within = np.bitwise_xor.accumulate(quotes) ^ inside
        yield ~within, letters
        inside = bool(within[-1])
        run = int(len(letters) - 1 - last[-1])
