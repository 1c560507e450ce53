"""Special tokens in text: which there are, and where a text is cut at them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from millpond.runtime.errors import TokenizerError
from millpond.runtime.identity import Vocabulary

WINDOW_CHARS = 2**16
"""Characters of one search: the interpreter lets other threads run between two of them."""

# Texts that end a generation by their wording, whatever ids and types the file gives; files are
# known that name only one of theirs, or give them the type of ordinary text.
END_TEXTS = frozenset(
    (
        "<end_of_turn>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<EOT>",
        "<|EOT|>",
        "<end_of_utterance>",
    )
)
_BYTE_TEXT = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_MARKUP = re.compile(r"<\|.*>|<.*\|>", re.DOTALL)
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)


class TokenKind(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SILENT = frozenset((TokenKind.CONTROL, TokenKind.UNKNOWN))
"""Kinds that give no text."""


def token_kinds(vocabulary: Vocabulary) -> tuple[TokenKind, ...]:
    """Return the kind of each token, with what files are known to get wrong put right.

    Without types, bytes are told by their text and the named ids are CONTROL or UNKNOWN.  A text in
    END_TEXTS, and a named id in angle or square brackets, is CONTROL whatever its type says.
    Raises TokenizerError for a wrong count, an unknown type or a named id outside the vocabulary.
    """
    count = len(vocabulary.tokens)
    if not count:
        raise TokenizerError("tokenizer.ggml.tokens: found none, expected at least one token")
    if vocabulary.types and len(vocabulary.types) != count:
        raise TokenizerError(
            f"tokenizer.ggml.token_type: found {len(vocabulary.types)} types, expected {count}"
        )
    try:
        kinds = [_KINDS[number] for number in vocabulary.types] or _kinds_by_text(vocabulary)
    except KeyError as error:
        raise TokenizerError(
            f"tokenizer.ggml.token_type: found type {error.args[0]}, expected 1 to 6"
        ) from None
    for name in ("bos", "eos", "unk", "eot"):
        token_id = getattr(vocabulary, name)
        if token_id is None:
            continue
        if not 0 <= token_id < count:
            raise TokenizerError(f"{name} id: found {token_id}, expected less than {count}")
        if name != "unk" and _BRACKETED.fullmatch(_text(vocabulary.tokens[token_id])):
            kinds[token_id] = TokenKind.CONTROL
    for token_id in ids_of_texts(vocabulary.tokens, END_TEXTS):
        kinds[token_id] = TokenKind.CONTROL
    return tuple(kinds)


def ids_of_texts(tokens: Sequence[bytes], texts: Iterable[str]) -> list[int]:
    """Return every id whose text is one of texts, in id order."""
    wanted = {text.encode() for text in texts}
    return [index for index, token in enumerate(tokens) if token in wanted]


def special_texts(
    vocabulary: Vocabulary, kinds: Sequence[TokenKind]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return (text → id of the tokens parsed on demand only, text → id of those always parsed).

    On demand: CONTROL, UNKNOWN, and what looks like markup of a chat (``<|…>``, ``<…|>``) though
    the file calls it USER_DEFINED: Gemma 4 does so with ``<|tool_response>``, which ends a turn.
    Always: the other USER_DEFINED tokens, such as runs of newlines and HTML tags.  Of duplicate
    texts the last counts.
    """
    on_demand: dict[str, int] = {}
    always: dict[str, int] = {}
    for index, kind in enumerate(kinds):
        if kind in SILENT or kind is TokenKind.USER_DEFINED:
            text = _text(vocabulary.tokens[index])
            if not text:
                continue
            if kind in SILENT or _MARKUP.fullmatch(text):
                on_demand[text] = index
            else:
                always[text] = index
    return on_demand, {text: index for text, index in always.items() if text not in on_demand}


def ordinary_texts(vocabulary: Vocabulary, kinds: Sequence[TokenKind]) -> dict[str, int]:
    """Return text → id of the tokens that ordinary text may become; of duplicates the last."""
    found: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, kinds, strict=True)):
        if kind in SILENT:
            continue
        text = _text(token)
        if text and not (kind is TokenKind.USER_DEFINED and _MARKUP.fullmatch(text)):
            found[text] = index
    return found


class SpecialCutter:
    """Cuts a text at special tokens: leftmost first, the longest of those that start there."""

    def __init__(self, guarded: Mapping[str, int], free: Mapping[str, int]) -> None:
        """Take text → id of tokens that tainted characters rule out, and of those they do not."""
        self._guarded = frozenset(guarded)
        self._ids = {**free, **guarded}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        # first two characters (or the only one) → lengths to try, longest first
        self._lengths = {
            start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()
        }
        self._start = re.compile(_starts_pattern(self._lengths)) if self._ids else None

    def cut(self, text: str, tainted: Sequence[int] = ()) -> Iterator[str | int]:
        """Yield the fragments of text between special tokens, and the ids of those, in order.

        tainted  growing indexes of characters that no guarded token may contain
        Two fragments are never adjacent and none is empty.
        """
        first = at = 0
        while (at := self._next_start(text, at)) < len(text):
            length = self._match(text, at, tainted)
            if not length:
                at += 1
                continue
            if at > first:
                yield text[first:at]
            yield self._ids[text[at : at + length]]
            first = at = at + length
        if first < len(text):
            yield text[first:]

    def _next_start(self, text: str, at: int) -> int:
        """Return the index, from at on, where a special token may start; else the text's length."""
        if self._start is None:
            return len(text)
        while at < len(text):
            end = min(at + WINDOW_CHARS, len(text))
            found = self._start.search(text, at, end)
            if found:
                return found.start()
            # the last character may be the first of two that straddle the window's end
            at = end if end == len(text) else end - 1
        return len(text)

    def _match(self, text: str, at: int, tainted: Sequence[int]) -> int:
        """Return the length of the longest special token at this index, or 0."""
        for start in (text[at : at + 2], text[at]):
            for length in self._lengths.get(start, ()):
                token = text[at : at + length]
                if token not in self._ids:
                    continue
                if token in self._guarded and tainted:
                    next_taint = bisect_left(tainted, at)
                    if next_taint < len(tainted) and tainted[next_taint] < at + length:
                        continue
                return length
        return 0


_KINDS = {kind.value: kind for kind in TokenKind} | {0: TokenKind.NORMAL}


def _kinds_by_text(vocabulary: Vocabulary) -> list[TokenKind]:
    is_byte = _BYTE_TEXT.fullmatch if vocabulary.model != "gpt2" else lambda _: None
    kinds = [TokenKind.BYTE if is_byte(token) else TokenKind.NORMAL for token in vocabulary.tokens]
    if vocabulary.unk is not None and 0 <= vocabulary.unk < len(kinds):
        kinds[vocabulary.unk] = TokenKind.UNKNOWN
    return kinds


def _text(token: bytes) -> str:
    """Return the token's text, ``""`` if it is no UTF-8: such a token cannot stand in a text."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def _starts_pattern(starts: Iterable[str]) -> str:
    """Return an expression for the first one or two characters of special tokens."""
    seconds: dict[str, set[str]] = {}
    for start in starts:
        seconds.setdefault(start[0], set()).add(start[1:])
    alternatives = []
    for first, following in sorted(seconds.items()):
        if "" in following:
            alternatives.append(re.escape(first))
        else:
            characters = "".join(re.escape(character) for character in sorted(following))
            alternatives.append(f"{re.escape(first)}[{characters}]")
    return "|".join(alternatives)
