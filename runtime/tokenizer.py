"""Text ↔ token ids, from the tokenizer arrays of a GGUF.

Invariants
(T1) Ordinary text never becomes a control token: ``encode`` cuts out only tokens that a file
     defines for users, and the engines below cannot give any other special id.
(T2) BOS stands once, and first, however often the text or a chat template wrote it.
(T3) EOS is never appended: every text here is to be continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from millpond.runtime.detokenizer import Detokenizer, Pieces
from millpond.runtime.errors import InvalidParameter, TokenizerError
from millpond.runtime.identity import Vocabulary
from millpond.runtime.tokenizer_bpe import ByteLevelEngine, Gemma4Engine
from millpond.runtime.tokenizer_special import (
    END_TEXTS,
    SpecialCutter,
    TokenKind,
    ids_of_texts,
    ordinary_texts,
    special_texts,
    token_kinds,
)
from millpond.runtime.tokenizer_spm import SpmEngine

BATCH_PARTS = 512
"""Parts of a text that are encoded together: enough for one call, few enough to stay short."""

__all__ = ["Detokenizer", "Tokenizer", "make_tokenizer"]


class Engine(Protocol):
    """Encodes ordinary text; its calls may run on several threads at once."""

    def encode_all(self, fragments: Sequence[str]) -> list[list[int]]:
        """Return the ids of each fragment; none of them is empty."""


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a model file; about a second for 262,144 tokens.

    Raises TokenizerError for arrays that are missing, broken or of a kind that is not supported.
    """
    return Tokenizer(vocabulary)


class Tokenizer:
    """Immutable; any thread, several at once.  Time and memory grow with the text: bound it.

    vocab_size       count of ids
    bos, eos         ids, or None
    adds_bos         whether the model wants BOS before a prompt
    end_ids          ids that end a generation: the file's EOS and EOT, and END_TEXTS
    control_texts    text → id of the special tokens that only ``encode_with_control`` parses

    A text with a lone surrogate has no bytes: every ``encode`` raises InvalidParameter for it.  NUL
    is a character like any other.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build it.  Raises TokenizerError."""
        kinds = token_kinds(vocabulary)
        on_demand, always = special_texts(vocabulary, kinds)
        self.vocab_size = len(vocabulary.tokens)
        self.bos, self.eos = vocabulary.bos, vocabulary.eos
        # some Gemma 4 files say that they want no BOS; the model does
        self.adds_bos = self.bos is not None and (
            vocabulary.add_bos or vocabulary.model == "gemma4"
        )
        named = (vocabulary.eos, vocabulary.eot)
        by_text = ids_of_texts(vocabulary.tokens, END_TEXTS)
        self.end_ids = frozenset(index for index in (*named, *by_text) if index is not None)
        self.control_texts = on_demand
        self._ordinary = SpecialCutter({}, always)
        self._with_control = SpecialCutter(on_demand, always)
        self._pieces = Pieces(vocabulary.tokens, kinds, vocabulary.model)
        self._engine = _engine(vocabulary, kinds)
        self._model = vocabulary.model

    def __repr__(self) -> str:
        return f"<Tokenizer {self._model}, {self.vocab_size} tokens>"

    # -- text → ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text: what looks like a control token is text.  No BOS."""
        return self._encode(text, self._ordinary, ())

    def encode_with_control(self, text: str, tainted: Sequence[int] = ()) -> list[int]:
        """Return the ids of a text that may name control tokens, such as a rendered chat.  No BOS.

        tainted  growing indexes of characters that are no part of a control token: user text
        """
        return self._encode(text, self._with_control, tainted)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of ordinary text, BOS first where the model wants it."""
        return self.with_bos(self.encode(text))

    def with_bos(self, token_ids: Iterable[int]) -> list[int]:
        """Return the ids with BOS once and first, where the model wants it or it stands there."""
        ids = list(token_ids)
        count = 0
        while count < len(ids) and ids[count] == self.bos:
            count += 1
        if count or self.adds_bos:
            assert self.bos is not None
            return [self.bos, *ids[count:]]
        return ids

    # -- ids → text

    def detokenizer(self) -> Detokenizer:
        """Return a fresh streaming detokeniser."""
        return Detokenizer(self._pieces)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids; control tokens give none."""
        return self.detokenizer().all(token_ids)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one id's text: possibly part of a character, empty for control."""
        return self._pieces.plain(token_id)

    def raw_piece(self, token_id: int) -> bytes:
        """Return the same with the names of control tokens as their text."""
        return self._pieces.raw(token_id)

    def special_text(self, token_id: int | None) -> str:
        """Return the name of a special token, ``""`` for None: what chat templates are given."""
        return "" if token_id is None else self.raw_piece(token_id).decode(errors="replace")

    def _encode(self, text: str, cutter: SpecialCutter, tainted: Sequence[int]) -> list[int]:
        _check_encodable(text)
        ids: list[int] = []
        parts = cutter.cut(text, tainted)
        while batch := list(islice(parts, BATCH_PARTS)):
            fragments = [part for part in batch if isinstance(part, str)]
            encoded = iter(self._engine.encode_all(fragments))
            for part in batch:
                if isinstance(part, str):
                    ids += next(encoded)
                else:
                    ids.append(part)
        return ids


def _engine(vocabulary: Vocabulary, kinds: Sequence[TokenKind]) -> Engine:
    match vocabulary.model:
        case "llama":
            return SpmEngine(vocabulary, kinds)
        case "gemma4":
            return Gemma4Engine(vocabulary, ordinary_texts(vocabulary, kinds))
        case "gpt2":
            return ByteLevelEngine(vocabulary, ordinary_texts(vocabulary, kinds))
        case model:
            raise TokenizerError(
                f"tokenizer.ggml.model: found {model!r}, expected llama, gemma4 or gpt2"
            )


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InvalidParameter(f"text: found a lone surrogate, {found}, expected text") from None
