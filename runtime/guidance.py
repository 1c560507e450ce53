"""Answers held to a JSON schema: which tokens may come next, by llguidance (the ``schema`` extra).

Invariants

(I1) A schema from outside costs bounded time and memory: it was compiled under the limits below,
     on the worker thread, before any request with it reaches the engine.
(I2) A guide that cannot go on raises GuideError: its own sequence ends, no other one does.
"""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol

import numpy as np
from millpond.runtime.errors import InvalidParameter
from numpy.typing import NDArray

COMPILED_MAX = 32
"""Compiled schemas that are kept; an agent has some ten."""
NESTING_MAX = 64
"""Levels of a schema; the library walks them by recursion."""
_LIMITS: Any = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
# Between tokens of JSON: as much white space as pretty printing needs, never endless.
_WHITE_SPACE: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


class GuideError(ValueError):
    """A guide that allows nothing more, or was given a token that it did not allow."""


class GuideTokenizer(Protocol):
    """What guides need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def piece(self, token_id: int) -> bytes: ...
    def raw_piece(self, token_id: int) -> bytes: ...


def can_guide() -> bool:
    """Tell whether answers can be held to a schema here."""
    return find_spec("llguidance") is not None


class Guides:
    """Compiles schemas for one model, and keeps the last ones; any thread, several at once."""

    def __init__(self, tokenizer: GuideTokenizer) -> None:
        """Note the tokenizer; what the library needs is made of it at the first schema."""
        self._tokenizer = tokenizer
        self._lock, self._making = Lock(), Lock()
        # mutable state, changed only under the locks
        self._library: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Guides {len(self._compiled)} compiled>"

    def check(self, schema: str) -> None:
        """Compile a schema, JSON text; about two seconds at the first one of a large vocabulary.

        Raises InvalidParameter if it is none, asks for what is not supported, is too complex, or
        the extra is not installed.
        """
        self._compiled_of(schema)

    def start(self, schema: str) -> Guide:
        """Return a guide at the beginning of an answer, for a schema that was checked.

        Raises GuideError.
        """
        try:
            return Guide(self._compiled_of(schema).deep_copy(), self._tokenizer)
        except InvalidParameter as error:
            raise GuideError(str(error)) from error

    def _compiled_of(self, schema: str) -> Any:
        if not can_guide():
            raise InvalidParameter("json_schema: it needs the schema extra, which is not installed")
        with self._lock:
            found = self._compiled.pop(schema, None)
        if found is None:
            found = self._compile(schema)  # unlocked: whoever decodes must not wait for it
        with self._lock:
            self._compiled[schema] = found
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        _check_nesting(schema)
        with self._making:
            if self._library is None:
                self._library = _library(self._tokenizer)
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_WHITE_SPACE)
        except ValueError as error:
            raise InvalidParameter(f"json_schema: {error!s:.500}") from None
        made = LLMatcher(self._library, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if made.is_error():
            raise InvalidParameter(f"json_schema: {made.get_error():.500}")
        return made


class Guide:
    """Where one answer stands in its schema; one thread at a time."""

    def __init__(self, matcher: Any, tokenizer: GuideTokenizer) -> None:
        self._tokenizer = tokenizer
        # mutable state, changed only in allowed and take
        self._matcher = matcher
        self._words = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._over = False

    def allowed(self, width: int) -> NDArray[np.bool_]:
        """Return which of ``width`` ids may come next, (width,); at the end those that end it.

        Raises GuideError.
        """
        found = np.zeros(width, dtype=np.bool_)
        if self._over:
            found[[one for one in self._tokenizer.end_ids if one < width]] = True
            return found
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise GuideError(f"json_schema: {self._matcher.get_error():.500}")
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        count = min(width, self._tokenizer.vocab_size)
        found[:count] = bits[:count]
        return found

    def take(self, token_id: int) -> None:
        """Go on by a token that was allowed; raises GuideError for any other."""
        if self._over:
            return
        self._over = token_id in self._tokenizer.end_ids
        if not self._matcher.consume_token(token_id):
            raise GuideError(f"json_schema: {self._matcher.get_error():.500}")


def _check_nesting(schema: str) -> None:
    """Raise InvalidParameter for a schema nested too deeply; brackets in strings count too."""
    level = 0
    for letter in schema:
        if letter in "[{":
            level += 1
            if level > NESTING_MAX:
                raise InvalidParameter(f"json_schema: expected at most {NESTING_MAX} levels")
        elif letter in "]}":
            level -= 1


class _Words:
    """The tokenizer in the form that the library reads."""

    def __init__(self, tokenizer: GuideTokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.raw_piece(one) for one in ids]
        self.special_token_ids = [one for one in ids if not tokenizer.piece(one)]
        self.eos_token_id = min(tokenizer.end_ids, default=0)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._encode(text)


def _library(tokenizer: GuideTokenizer) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.end_ids:
        raise InvalidParameter("json_schema: this model has no token that ends an answer")
    return LLTokenizer(
        TokenizerWrapper(_Words(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.end_ids),
        slices=LLTokenizer.json_slices(),
    )
