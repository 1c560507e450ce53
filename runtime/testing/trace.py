"""``Trace``: what happened in a world, in order: messages, disk operations, clients, faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

SHOWN_BYTES = 6  # of a hash or of token ids; enough to tell them apart


class Trace:
    """Keeps a digest of everything, and the lines themselves if asked to.

    clock  virtual seconds, readable from where the events happen
    """

    def __init__(self, clock: Callable[[], float], lines: list[str] | None = None) -> None:
        self._clock, self.lines = clock, lines
        # mutable state, changed only in add
        self._digest = hashlib.blake2b(digest_size=16)
        self.events = 0

    def message(self, arrow: str, data: bytes) -> None:
        """Note an encoded message; fits a channel's ``tap``."""
        self._add(arrow, data)
        if self.lines is not None:
            self._show(arrow, _readable(msgspec.msgpack.decode(data)))

    def event(self, source: str, text: str) -> None:
        """Note anything else."""
        self._add(source, text.encode())
        if self.lines is not None:
            self._show(source, text)

    def digest(self) -> str:
        """Return the hash of all so far; equal worlds have equal ones."""
        return self._digest.hexdigest()

    def _add(self, source: str, data: bytes) -> None:
        self.events += 1
        self._digest.update(b"%s %.9f " % (source.encode(), self._clock()) + data)

    def _show(self, source: str, text: str) -> None:
        assert self.lines is not None
        self.lines.append(f"{self._clock():10.4f}  {source:<12} {text}")


def _readable(message: dict[str, Any]) -> str:
    kind = message.pop("type")
    fields = (f"{name}={_short(value)}" for name, value in message.items())
    return f"{kind} {' '.join(fields)}"


def _short(value: object) -> str:
    if isinstance(value, bytes):
        more = "…" if len(value) > SHOWN_BYTES else ""
        return value[:SHOWN_BYTES].hex() + more
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return f"[{' '.join(_short(one) for one in value)}]"
    return str(value)
