"""Answers held to a JSON schema or a grammar: which tokens may come next, by llguidance.

The library is the ``schema`` extra.

Invariants

(I1) A form from outside costs bounded time and memory: it was compiled under the limits below, on
     the worker thread, before any request with it reaches the engine.
(I2) A guide that cannot go on raises GuideError: its own sequence ends, no other one does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol

import msgspec
import numpy as np
from millpond.codecs.choices import AnswerForm
from millpond.runtime.errors import InvalidParameter
from numpy.typing import NDArray

COMPILED_MAX = 32
"""Compiled forms that are kept; an agent has some ten."""
NESTING_MAX = 64
"""Levels of a form; the library walks them by recursion."""
REFERRED_LEVELS_MAX = 512
"""Levels of all that ``$ref`` names, together: the library follows a chain of references by
recursion, about 4 KiB of stack a level, and a stack that overflows ends the process."""
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
    """Tell whether answers can be held to a form here."""
    return find_spec("llguidance") is not None


class Guides:
    """Compiles forms for one model, and keeps the last ones; any thread, several at once."""

    def __init__(self, tokenizer: GuideTokenizer) -> None:
        """Note the tokenizer; what the library needs is made of it at the first form."""
        self._tokenizer = tokenizer
        self._lock, self._making = Lock(), Lock()
        # mutable state, changed only under the locks
        self._library: Any = None
        self._compiled: OrderedDict[AnswerForm, Any] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Guides {len(self._compiled)} compiled>"

    def check(self, form: AnswerForm) -> None:
        """Compile a form; about two seconds at the first one of a large vocabulary.

        Raises InvalidParameter if it is none, asks for what is not supported, is too complex, or
        the extra is not installed.
        """
        self._compiled_of(form)

    def start(self, form: AnswerForm) -> Guide:
        """Return a guide at the beginning of an answer, for a form that was checked.

        Raises GuideError.
        """
        try:
            return Guide(self._compiled_of(form).deep_copy(), form.kind, self._tokenizer)
        except InvalidParameter as error:
            raise GuideError(str(error)) from error

    def _compiled_of(self, form: AnswerForm) -> Any:
        if not can_guide():
            raise InvalidParameter(f"{form.kind}: it needs the schema extra, not installed here")
        with self._lock:
            found = self._compiled.pop(form, None)
        if found is None:
            found = self._compile(form)  # unlocked: whoever decodes must not wait for it
        with self._lock:
            self._compiled[form] = found
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, form: AnswerForm) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        kind, text = form
        _check_nesting(form)
        if kind == "json_schema":
            check_references(_decoded(text))
        with self._making:
            if self._library is None:
                self._library = _library(self._tokenizer)
        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=_WHITE_SPACE)
            else:
                grammar = LLMatcher.grammar_from_lark(text)
        except ValueError as error:
            raise InvalidParameter(f"{kind}: {error!s:.500}") from None
        made = LLMatcher(self._library, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if made.is_error():
            raise InvalidParameter(f"{kind}: {made.get_error():.500}")
        return made


class Guide:
    """Where one answer stands in its form; one thread at a time."""

    def __init__(self, matcher: Any, kind: str, tokenizer: GuideTokenizer) -> None:
        self._kind, self._tokenizer = kind, tokenizer
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
            raise GuideError(f"{self._kind}: {self._matcher.get_error():.500}")
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
            raise GuideError(f"{self._kind}: {self._matcher.get_error():.500}")


def _check_nesting(form: AnswerForm) -> None:
    """Raise InvalidParameter for a form nested too deeply; brackets in strings count too."""
    level = 0
    opening, closing = ("[{(", "]})") if form.kind == "grammar" else ("[{", "]}")
    for letter in form.text:
        if letter in opening:
            level += 1
            if level > NESTING_MAX:
                raise InvalidParameter(f"{form.kind}: expected at most {NESTING_MAX} levels")
        elif letter in closing:
            level -= 1


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidParameter(f"json_schema: {error}") from None


def check_references(schema: Any) -> None:
    """Raise InvalidParameter for a schema, of bounded nesting, whose references lead too deep."""
    targets: set[str] = set()
    _add_references(schema, targets)
    known: dict[int, int] = {}
    levels = sum(_levels(_referred(schema, one), known) for one in targets)
    if levels > REFERRED_LEVELS_MAX:
        raise InvalidParameter(
            f"json_schema: found {levels} levels behind references, "
            f"expected at most {REFERRED_LEVELS_MAX}"
        )


def _add_references(found: Any, targets: set[str]) -> None:
    if isinstance(found, dict) and isinstance(found.get("$ref"), str):
        targets.add(found["$ref"])
    for one in _parts(found):
        _add_references(one, targets)


def _referred(schema: Any, target: str) -> Any:
    """Return what a reference names; the whole schema where that cannot be told here."""
    found = schema
    for name in target.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return schema if found is None else found


def _levels(found: Any, known: dict[int, int]) -> int:
    """Levels of a value; ``known`` by identity, so that each is looked at once."""
    if id(found) not in known:
        known[id(found)] = 1 + max((_levels(one, known) for one in _parts(found)), default=0)
    return known[id(found)]


def _parts(found: Any) -> Iterable[Any]:
    if isinstance(found, dict):
        return found.values()
    return found if isinstance(found, list) else ()


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
        raise InvalidParameter("this model has no token that ends an answer")
    return LLTokenizer(
        TokenizerWrapper(_Words(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.end_ids),
        slices=LLTokenizer.json_slices(),
    )
