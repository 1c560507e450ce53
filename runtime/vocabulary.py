"""The tokenizer arrays of a GGUF, checked for type and length, as a ``Vocabulary``.

Source of keys and defaults: llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from millpond.codecs.gguf_values import brief
from millpond.runtime.errors import TokenizerError
from millpond.runtime.identity import Vocabulary

_PREFIX = "tokenizer.ggml."
TYPES_MAX = 6
# BPE files of the Llama 3 kind want BOS though they may not say so.
_BPE_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")


def read_vocabulary(metadata: Mapping[str, object], rows: int) -> Vocabulary:
    """Return the vocabulary of a file.

    rows  of the embedding: no token id may lie beyond

    Raises TokenizerError if the arrays are missing, mistyped or do not fit each other.  A special
    id outside the vocabulary counts as absent.
    """
    model, pre = _text(metadata, _PREFIX + "model"), _text(metadata, _PREFIX + "pre")
    if not model:
        raise TokenizerError(f"{_PREFIX}model: found none, expected llama, gpt2 or gemma4")
    tokens = _strings(metadata, _PREFIX + "tokens")
    if not 1 <= len(tokens) <= rows:
        raise TokenizerError(
            f"{_PREFIX}tokens: found {len(tokens)} tokens, expected 1 to {rows}, "
            "the rows of the embedding"
        )
    count = len(tokens)
    is_spm = model == "llama"
    add_bos = is_spm or pre in _BPE_WITH_BOS
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        scores=_scores(metadata, count),
        types=_types(metadata, count),
        merges=_strings(metadata, _PREFIX + "merges"),
        bos=_token_id(metadata, "bos_token_id", count),
        eos=_token_id(metadata, "eos_token_id", count),
        unk=_token_id(metadata, "unknown_token_id", count),
        eot=_token_id(metadata, "eot_token_id", count),
        # Some Gemma 4 files say false by mistake.
        add_bos=model == "gemma4" or _flag(metadata, "add_bos_token", add_bos),
        add_eos=_flag(metadata, "add_eos_token", False),
        add_space_prefix=_flag(metadata, "add_space_prefix", is_spm),
        chat_template=_text(metadata, "tokenizer.chat_template"),
    )


def _text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{_PREFIX}{key}: found {brief(value)}, expected a bool")
    return value


def _token_id(metadata: Mapping[str, object], key: str, count: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        return None
    return value


def _strings(metadata: Mapping[str, object], key: str) -> tuple[bytes, ...]:
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, bytes) for entry in value):
        raise TokenizerError(f"{key}: found another type, expected an array of strings")
    return tuple(value)


def _scores(metadata: Mapping[str, object], count: int) -> tuple[float, ...]:
    value = _numbers(metadata, "scores", "f", count)
    if not np.isfinite(value).all():
        raise TokenizerError(f"{_PREFIX}scores: found a number that is not finite")
    return tuple(value.tolist())


def _types(metadata: Mapping[str, object], count: int) -> tuple[int, ...]:
    value = _numbers(metadata, "token_type", "iu", count)
    if len(value) and not (value.min() >= 0 and value.max() <= TYPES_MAX):
        raise TokenizerError(
            f"{_PREFIX}token_type: found {value.min()} to {value.max()}, expected 0 to {TYPES_MAX}"
        )
    return tuple(value.tolist())


def _numbers(metadata: Mapping[str, object], key: str, kinds: str, count: int) -> np.ndarray:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return np.empty(0)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
        raise TokenizerError(
            f"{_PREFIX}{key}: found another type or length, expected {count} numbers, one per token"
        )
    return value
