"""BPE with merges: ``tokenizer.ggml.model`` = ``gemma4`` or ``gpt2`` (byte-level).

The merging is Hugging Face's ``tokenizers``; the library releases the interpreter lock in batches.
Only ordinary text reaches it: special tokens were cut out before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from millpond.runtime.detokenizer import SPACE_MARK
from millpond.runtime.errors import TokenizerError
from millpond.runtime.identity import Vocabulary
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

BATCH_WORDS = 512
"""Runs of one call: enough to be fast, few enough to hold the interpreter lock shortly."""

_LINES = re.compile(r"\n+|[^\n]+")

# -- pre-tokenisers: expressions that cut a text into words, one after another, under the names
# that files give in tokenizer.ggml.pre

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)


def _cl100k(digits: str) -> tuple[str]:
    """Return the expression of the Llama 3 and Qwen 2 kind, which differ in how digits group."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )


def _o200k(words: Sequence[str], digits: str) -> tuple[str]:
    """Return the expression of the GPT-4o kind, which cuts words where lower case ends."""
    return (rf"{'|'.join(words)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_DIGITS_APART = (r"\p{N}", *_GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]")
_TEKKEN = _o200k(_CASED, r"\p{N}")
_GPT4O = _o200k([f"{word}{_CONTRACTIONS}?" for word in _CASED], r"\p{N}{1,3}")

# Letters with case, those of some scripts and of mathematics left out.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}"
    r"\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2A}]]"
)
_DEEPSEEK_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_DEEPSEEK_LETTERS}+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _DEEPSEEK_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

_EXPRESSIONS: dict[str, tuple[tuple[str, ...], Sequence[str]]] = {
    "default": (_DEFAULT, ("", "default")),
    "gpt2": (_GPT2, ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat")),
    "digits apart": (
        _DIGITS_APART,
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    "llama 3": (
        _LLAMA3,
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "dbrx", "smaug-bpe"),
    ),
    "qwen 2": (_QWEN2, ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan")),
    "falcon": (_FALCON, ("falcon",)),
    "tekken": (_TEKKEN, ("tekken",)),
    "gpt-4o": (_GPT4O, ("gpt-4o", "llama4")),
    "deepseek llm": (_DEEPSEEK_LLM, ("deepseek-llm",)),
    "deepseek coder": (_DEEPSEEK_CODER, ("deepseek-coder",)),
    "deepseek 3": (_DEEPSEEK3, ("deepseek-v3", "hunyuan-dense")),
}
PRE_TOKENIZERS = {name: found for found, names in _EXPRESSIONS.values() for name in names}
"""``tokenizer.ggml.pre`` → expressions."""

# A word that is a token is taken whole, without merging.
_WHOLE_WORDS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "tekken")
)


class Gemma4Engine:
    """Spaces become U+2581; a run of newlines is cut out, and taken whole if it is a token."""

    def __init__(self, vocabulary: Vocabulary, ordinary: Mapping[str, int]) -> None:
        """Build from text → id of the ordinary tokens.  Raises TokenizerError for broken merges."""
        self._newlines = {text: index for text, index in ordinary.items() if not text.strip("\n")}
        self._tokenizer = Tokenizer(_model(vocabulary, ordinary))

    def encode_all(self, fragments: Sequence[str]) -> list[list[int]]:
        """Return the ids of each fragment; none of them is empty."""
        return [self._encode(text.replace(" ", SPACE_MARK)) for text in fragments]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        runs = (found[0] for found in _LINES.finditer(text))
        while batch := list(islice(runs, BATCH_WORDS)):
            merged = _encode_words(
                self._tokenizer, [run for run in batch if run not in self._newlines]
            )
            for run in batch:
                newline = self._newlines.get(run)
                ids += next(merged) if newline is None else (newline,)
        return ids


class ByteLevelEngine:
    """GPT-2's kind: the text is cut into words, whose bytes are spelled as printable characters.

    A byte that the vocabulary lacks is dropped, as every implementation of such files does.
    """

    def __init__(self, vocabulary: Vocabulary, ordinary: Mapping[str, int]) -> None:
        """Build from text → id of the ordinary tokens.

        Raises TokenizerError for broken merges or an unknown pre-tokeniser.
        """
        expressions = PRE_TOKENIZERS.get(vocabulary.pre)
        if expressions is None:
            known = ", ".join(sorted(name for name in PRE_TOKENIZERS if name))
            raise TokenizerError(
                f"tokenizer.ggml.pre: found {vocabulary.pre!r}, which is not supported; "
                f"supported are {known}"
            )
        self._tokenizer = Tokenizer(_model(vocabulary, ordinary))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(found), "isolated") for found in expressions),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode_all(self, fragments: Sequence[str]) -> list[list[int]]:
        """Return the ids of each fragment; none of them is empty."""
        return list(_encode_words(self._tokenizer, fragments))


def _model(vocabulary: Vocabulary, ordinary: Mapping[str, int]) -> models.BPE:
    """Return the library's model.  Of duplicate merges the first counts, as its rank is lower."""
    if not vocabulary.merges:
        raise TokenizerError("tokenizer.ggml.merges: found none, expected the merges of a BPE")
    pairs = list(map(_split_merge, dict.fromkeys(vocabulary.merges)))
    known = dict(ordinary)
    unknown = None
    if vocabulary.model != "gpt2" and vocabulary.unk is not None:
        unknown = vocabulary.tokens[vocabulary.unk].decode(errors="replace")
        known[unknown] = vocabulary.unk
    # a merge of tokens that are missing, or special, can never happen in ordinary text
    usable = [pair for pair in pairs if _is_known(pair, known)]
    return models.BPE(
        vocab=known,
        merges=usable,
        unk_token=unknown,
        fuse_unk=False,
        byte_fallback=vocabulary.model != "gpt2",
        ignore_merges=vocabulary.pre in _WHOLE_WORDS,
    )


def _is_known(pair: tuple[str, str], known: Mapping[str, int]) -> bool:
    return pair[0] in known and pair[1] in known and pair[0] + pair[1] in known


def _split_merge(merge: bytes) -> tuple[str, str]:
    """Return both sides: they part at the first space that is not the first character."""
    left, _, right = (text := merge.decode(errors="replace"))[1:].partition(" ")
    return text[:1] + left, right


def _encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> Iterator[list[int]]:
    """Return the ids of each text; the library works on all of them without the lock."""
    return (
        encoding.ids
        for encoding in tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
    )
