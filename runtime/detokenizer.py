"""Token ids → bytes → text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from millpond.runtime.tokenizer_special import SILENT, TokenKind

SPACE_MARK = "\u2581"
"""Stands for a space in SentencePiece-style vocabularies."""


def byte_level_alphabet() -> dict[str, int]:
    """Return character → byte of byte-level BPE vocabularies (GPT-2's ``bytes_to_unicode``).

    Printable Latin-1 bytes stand for themselves; the other 68 are U+0100 and up, in byte order.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Pieces:
    """The bytes that each id stands for; immutable, any thread.

    An id outside the vocabulary (a model may have more rows of logits than tokens) gives no bytes.
    """

    def __init__(self, tokens: Sequence[bytes], kinds: Sequence[TokenKind], model: str) -> None:
        self._tokens, self._kinds = tokens, kinds
        self._alphabet = byte_level_alphabet() if model == "gpt2" else None

    def plain(self, token_id: int) -> bytes:
        """Return the bytes of this id's text; none for control and unknown tokens."""
        if not 0 <= token_id < len(self._tokens) or self._kinds[token_id] in SILENT:
            return b""
        return self.raw(token_id)

    def raw(self, token_id: int) -> bytes:
        """Return the same, with the names of control and unknown tokens as their text."""
        if not 0 <= token_id < len(self._tokens):
            return b""
        token, kind = self._tokens[token_id], self._kinds[token_id]
        if kind is TokenKind.USER_DEFINED or kind in SILENT:
            return token
        if kind is TokenKind.BYTE:
            return _byte(token)
        if self._alphabet is None:
            return token.replace(SPACE_MARK.encode(), b" ")
        return b"".join(
            bytes((self._alphabet[character],))
            if character in self._alphabet
            else character.encode()
            for character in token.decode(errors="replace")
        )


class Detokenizer:
    """Streams text: ``push`` never gives half a character.

    Bytes that can begin a character are held back until it is whole or cannot become so; what is no
    UTF-8 becomes U+FFFD, as if all bytes had been decoded at once.  One per completion; not shared
    between threads.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        # mutable state, changed only in push and finish
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that became whole with this id."""
        return self._decoder.decode(self._pieces.plain(token_id))

    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD; start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def all(self, token_ids: Iterable[int]) -> str:
        """Return the whole text of a completion."""
        return "".join(map(self.push, token_ids)) + self.finish()


def _byte(token: bytes) -> bytes:
    """Return the byte that ``<0xNN>`` names; any other text stands for itself."""
    try:
        return bytes((int(token[3:5], 16),)) if len(token) == 6 else token
    except ValueError:
        return token
