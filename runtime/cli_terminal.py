"""Where a command writes: results on stdout, everything else on stderr, line by line."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec

# What a terminal would obey; names and texts come out of files that nobody vouches for.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS_BUT_LAYOUT = {code: text for code, text in _CONTROLS.items() if code not in b"\t\n"}


class OutputClosed(Exception):
    """Nobody reads stdout any more, or it cannot be written.

    reason  what the system said; empty if the reader simply went away
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Terminal:
    """The two streams of a process; either may be None (closed).  One thread at a time."""

    def __init__(self, out: TextIO | None, err: TextIO | None) -> None:
        self._out, self._err = out, err
        # mutable state, changed only in say
        self._said: set[str] = set()

    @property
    def is_interactive(self) -> bool:
        """True if a person watches stderr."""
        return self._err is not None and self._err.isatty()

    def say(self, line: str) -> None:
        """Write one line to stderr, unless the same line was written before."""
        shown = one_line(line)
        if shown not in self._said:
            self._said.add(shown)
            self._write_note(shown + "\n")

    def tell(self, line: str) -> None:
        """Write one line to stderr, however often it was written before."""
        self._write_note(one_line(line) + "\n")

    def ask(self, text: str) -> None:
        """Write the beginning of a line to stderr, where a person watches."""
        if self.is_interactive:
            self._write_note(text)

    def write_text(self, text: str) -> None:
        """Write text to stdout now; on a terminal what it would obey is shown instead.

        Raises OutputClosed.
        """
        if self._out is not None and self._out.isatty():
            text = text.translate(_CONTROLS_BUT_LAYOUT)
        self.write_bytes(text.encode("utf-8", "replace"))

    def write_json(self, value: Any) -> None:
        """Write one JSON object and a newline to stdout, UTF-8 whatever the locale.

        Raises OutputClosed.
        """
        self.write_bytes(msgspec.json.encode(value) + b"\n")

    def write_bytes(self, data: bytes) -> None:
        """Write bytes to stdout and flush.  Raises OutputClosed."""
        if self._out is None:
            raise OutputClosed("it is closed")
        try:
            self._out.flush()
            self._out.buffer.write(data)
            self._out.buffer.flush()
        except OSError as error:
            self._silence()
            gone = error.errno == errno.EPIPE
            raise OutputClosed("" if gone else error.strerror or str(error)) from error

    def show_log(self, level: int) -> None:
        """Send millpond's log from this level of ``logging`` on to stderr, a line a record."""
        logger = logging.getLogger("millpond")
        logger.handlers[:] = [_Lines(self)]
        logger.setLevel(level)
        logger.propagate = False

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that something takes its time, where a person watches."""
        if not self.is_interactive:
            yield
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(one_line(what))):
            yield

    def _write_note(self, text: str) -> None:
        if self._err is None:
            return
        try:
            self._err.write(text.encode("utf-8", "replace").decode())
            self._err.flush()
        except (OSError, ValueError):
            self._err = None

    def _silence(self) -> None:
        """What Python still holds for stdout is lost anyway: spare us its complaint at exit."""
        assert self._out is not None
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # a stand-in without a descriptor
            pass
        self._out = None


class _Lines(logging.Handler):
    """Log records as lines of a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._terminal.say(f"millpond: {record.getMessage()}")


def one_line(text: str) -> str:
    """Return the text as one line: newlines as spaces, other controls as ``\\xNN``."""
    return visible(" ".join(text.split("\n"))).strip()


def visible(text: str) -> str:
    """Return the text with every control character, newlines included, as ``\\xNN``."""
    return text.translate(_CONTROLS)


def bytes_text(count: int) -> str:
    """Return a count of bytes for people: ``512 B``, ``56.6 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
