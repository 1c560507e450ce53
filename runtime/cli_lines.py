"""Lines of stdin for a command that talks: read on a thread of their own, one when asked for.

A read that nobody ends cannot be cancelled, so the thread is a daemon and reads the descriptor
itself: no buffer of Python's is locked when the process exits.  What is left of a line stays for
the next call.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from anyio import Event
from anyio.lowlevel import checkpoint, current_token
from millpond.runtime.cli_prompt import PROMPT_BYTES_MAX
from millpond.runtime.errors import InvalidParameter

READ_BYTES = 2**16


class Lines:
    """Lines of a descriptor; made and used on one event loop, one reader at a time.

    descriptor  read from, never closed
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        native: Any = current_token().native_token
        self._soon: Callable[..., Any] = (
            getattr(native, "run_sync_soon", None) or native.call_soon_threadsafe
        )
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        # mutable state, changed only in next, _answer and, the buffer, on the thread
        self._answers: list[bytes | OSError] = []
        self._answered = Event()
        self._asked = self._ended = False
        self._buffer = bytearray()
        threading.Thread(target=self._main, name="stdin", daemon=True).start()

    async def next(self) -> str | None:
        """Return the next line without its end, None after the last one.

        A call that is cancelled loses nothing: the next one gets the line.  Raises InvalidParameter
        for a line that is too long or no UTF-8, and for a stdin that cannot be read, which then has
        no further line.
        """
        await checkpoint()
        if self._ended:
            return None
        if not self._asked:
            self._asked = True
            self._wanted.put(None)
        while not self._answers:
            await self._answered.wait()
        self._asked, self._answered = False, Event()
        answer = self._answers.pop()
        self._ended = not answer or isinstance(answer, OSError)
        if isinstance(answer, OSError):
            raise InvalidParameter(f"stdin: {answer.strerror}")
        return _text(answer)

    def _main(self) -> None:
        """The thread: one line for each time that it is asked."""
        while True:
            self._wanted.get()
            answer: bytes | OSError
            try:
                answer = self._read_line()
            except OSError as error:
                answer = error
            try:
                self._soon(self._answer, answer)
            except RuntimeError:
                return  # the loop is gone, and nobody waits any more

    def _answer(self, answer: bytes | OSError) -> None:
        self._answers.append(answer)
        self._answered.set()

    def _read_line(self) -> bytes:
        """Return a line with its end; without one the last line, or nothing at the end.

        Of a line that is too long the beginning is returned, one byte more than allowed.
        """
        searched = 0
        too_long = b""
        while True:
            end = self._buffer.find(b"\n", searched) + 1
            if end:
                line = bytes(self._buffer[:end])
                del self._buffer[:end]
                return too_long or line
            if len(self._buffer) > PROMPT_BYTES_MAX:
                too_long = too_long or bytes(self._buffer[: PROMPT_BYTES_MAX + 1])
                self._buffer.clear()
            searched = len(self._buffer)
            data = os.read(self._descriptor, READ_BYTES)
            if not data:
                line, self._buffer = bytes(self._buffer), bytearray()
                return too_long or line
            self._buffer += data


def _text(line: bytes) -> str | None:
    if not line:
        return None
    if len(line) > PROMPT_BYTES_MAX:
        raise InvalidParameter(
            f"stdin: found a line of more than {PROMPT_BYTES_MAX} bytes, the most that a prompt has"
        )
    try:
        return line.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"stdin: found byte 0x{line[error.start]:02x} in a line, expected text in UTF-8"
        ) from None
