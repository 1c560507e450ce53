"""How many values a body has, counted before anything is made of them.  Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from millpond.actors.http.problems import ApiError

VALUES_MAX = 2**20 + 2**16
"""Values of a body, about: a million token ids fit."""
CONTAINERS_MAX = 50_000
"""Lists and objects of a body: 10,000 messages, and 512 tools, fit."""


def check_values(data: bytes) -> None:
    """Raise ApiError 413 for more values than any request has use for.

    Decoding them would hold up everybody: objects cost far more time than bytes.  Time and memory
    are linear, and most of it is spent without the interpreter's lock: call it on a thread.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    letters: Any = np.frombuffer(plain, dtype=np.uint8)
    outside = np.bitwise_xor.accumulate(letters == ord('"')) ^ True
    values = np.count_nonzero(outside & (letters == ord(",")))
    opened = (letters == ord("[")) | (letters == ord("{"))
    containers = np.count_nonzero(outside & opened)
    if values > VALUES_MAX or containers > CONTAINERS_MAX:
        raise ApiError(
            413,
            "body_too_complex",
            f"the body has {values} values in {containers} lists and objects, expected at most "
            f"{VALUES_MAX} in {CONTAINERS_MAX}",
        )
