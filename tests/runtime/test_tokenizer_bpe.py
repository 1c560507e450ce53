"""BPE with merges: byte-level with the common pre-tokenisers, and Gemma 4's kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.runtime.detokenizer import byte_level_alphabet
from millpond.runtime.errors import TokenizerError
from millpond.runtime.identity import Vocabulary
from millpond.runtime.tokenizer import Tokenizer, make_tokenizer
from millpond.runtime.tokenizer_bpe import PRE_TOKENIZERS

LETTERS = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
SPELL = {byte: letter for letter, byte in byte_level_alphabet().items()}


def spelled(text: str) -> str:
    return "".join(SPELL[byte] for byte in text.encode())


def vocabulary(**changes: Any) -> Vocabulary:
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": (),
        "scores": (),
        "types": (),
        "merges": (),
        "bos": None,
        "eos": None,
        "unk": None,
        "eot": None,
        "add_bos": False,
        "add_eos": False,
        "add_space_prefix": False,
        "chat_template": "",
    }
    return Vocabulary(**(fields | changes))


def byte_level(pre: str, **changes: Any) -> Tokenizer:
    """256 letters; then every word of the text below as it would merge if nothing cut it."""
    words = ["ab", "abc", "12", "123", "1234", " a", " ab", "  ", "\n\n", "!a", "'s", "'S", "!!"]
    tokens = [*LETTERS, *map(spelled, words), "<|im_start|>", "<|im_end|>"]
    merges = [(spelled(word[:-1]), spelled(word[-1])) for word in words]
    fields: dict[str, Any] = {
        "pre": pre,
        "tokens": tuple(token.encode() for token in tokens),
        "types": (1,) * (len(tokens) - 2) + (3, 3),
        "merges": tuple(f"{left} {right}".encode() for left, right in merges),
        "eos": len(tokens) - 1,
    }
    return make_tokenizer(vocabulary(**(fields | changes)))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.piece(token_id).decode() for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "abc 1234", ["abc", " ", "1234"]),
        ("gpt-2", "it's", ["i", "t", "'s"]),
        ("gpt-2", "it'S", ["i", "t", "'", "S"]),
        ("gpt-2", "b  a", ["b", " ", " a"]),
        ("gpt-2", "!ab", ["!", "ab"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "it'S", ["i", "t", "'S"]),
        ("llama-bpe", "!a", ["!a"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "!a\n\n", ["!a", "\n\n"]),
        ("smollm", "ab12", ["ab", "1", "2"]),
        ("smollm", "!a", ["!", "a"]),
        ("tekken", "12", ["1", "2"]),
        ("gpt-4o", "1234", ["123", "4"]),
        ("gpt-4o", "it's", ["i", "t", "'s"]),
        ("falcon", "1234", ["123", "4"]),
        ("default", "!!ab", ["!!", "ab"]),
        ("deepseek-llm", "1234 ab", ["1234", " ", "ab"]),
        ("deepseek-llm", "!!ab\n\n", ["!!", "ab", "\n", "\n"]),
        ("deepseek-coder", "1234 ab", ["1", "2", "3", "4", " ", "ab"]),
        ("deepseek-coder", "!!ab", ["!!", "ab"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("deepseek-v3", "!a\n\n", ["!a", "\n\n"]),
    ],
)
def test_pre_tokenisers_cut_as_their_name_says(pre: str, text: str, expected: list[str]) -> None:
    assert words(byte_level(pre), text) == expected


def test_an_unknown_pre_tokeniser_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"found 'klingon-bpe'.*supported are.*llama-bpe"):
        byte_level("klingon-bpe")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(deadline=None)
@given(text=st.text())
def test_byte_level_text_survives(pre: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = _cached(pre)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.vocab_size - 2


_CACHE: dict[str, Tokenizer] = {}


def _cached(pre: str) -> Tokenizer:
    return _CACHE.setdefault(pre, byte_level(pre))


def test_control_tokens_of_byte_level_text_are_text() -> None:
    tokenizer = byte_level("qwen2")
    text = "<|im_end|>\n<|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    end = tokenizer.vocab_size - 1
    assert tokenizer.encode_with_control(text)[::2] == [end, end - 1]
    assert tokenizer.end_ids == {end}


def test_a_word_that_spells_a_control_token_is_not_taken_whole() -> None:
    """Llama 3 takes words that are tokens whole, without merging: a control token is no word."""
    base = byte_level("llama-bpe")
    tokens = [*LETTERS, spelled("ab"), "stop"]
    tokenizer = byte_level(
        "llama-bpe",
        tokens=tuple(token.encode() for token in tokens),
        types=(1,) * 257 + (3,),
        merges=(b"a b", b"s t", b"st o", b"sto p"),
        eos=257,
    )
    assert base.encode("stop") == tokenizer.encode("stop")
    assert words(tokenizer, "stop ab") == ["s", "t", "o", "p", " ", "ab"]


def test_bytes_that_a_vocabulary_lacks_are_dropped() -> None:
    tokenizer = byte_level(
        "gpt-2", tokens=(b"a", b"b", b"ab"), types=(), merges=(b"a b",), eos=None
    )
    assert words(tokenizer, "ab\u00e9ba") == ["ab", "b", "a"]


def test_merges_that_cannot_happen_and_duplicates_do_no_harm() -> None:
    tokenizer = byte_level(
        "gpt-2",
        tokens=(b"a", b"b", b"c", b"ab", b"bc", b"ab"),
        types=(),
        merges=(b"a b", b"x y", b"b c", b"a b", b"ab", b"\xff \xff", b""),
        eos=None,
    )
    assert tokenizer.encode("abc") == [5, 2]


def test_merges_must_be_there() -> None:
    with pytest.raises(TokenizerError, match="merges: found none"):
        byte_level("gpt-2", merges=())


def gemma4(**changes: Any) -> Tokenizer:
    tokens = [b"<pad>", b"<eos>", b"<bos>", b"<unk>", b"<|turn>", b"<turn|>", b"<|channel>"]
    tokens += [b"<0x%02X>" % byte for byte in range(256)]
    tokens += [b"\n", b"\n\n", b"\n\n\n", "\u2581".encode(), b"a", b"b", "\u2581a".encode(), b"ab"]
    fields: dict[str, Any] = {
        "model": "gemma4",
        "pre": "",
        "tokens": tuple(tokens),
        "types": (3, 3, 3, 2, 3, 3, 4, *(6,) * 256, *(1,) * 8),
        "merges": ("\u2581 a".encode(), b"a b", b"\n \n", b"\n\n \n\n"),
        "bos": 2,
        "eos": 1,
        "unk": 3,
    }
    return make_tokenizer(vocabulary(**(fields | changes)))


def test_gemma_4_wants_bos_whatever_its_file_says() -> None:
    assert gemma4(add_bos=False).encode_prompt("a")[0] == 2


def test_gemma_4_takes_a_known_run_of_newlines_whole_and_merges_others() -> None:
    tokenizer = gemma4()
    newline = tokenizer.encode("\n")[0]
    assert tokenizer.encode("a\n\n\nb")[1:-1] == [newline + 2]
    assert tokenizer.encode("\n\n\n\n\n") == [newline + 1, newline + 1, newline]


def test_gemma_4_markup_is_parsed_on_demand_only_and_shown() -> None:
    tokenizer = gemma4()
    assert 6 not in tokenizer.encode("<|channel>")
    assert tokenizer.encode_with_control("<|channel><turn|>") == [6, 5]
    assert tokenizer.decode([6, 5]) == "<|channel>"
    assert tokenizer.end_ids == {1, 5}


@settings(deadline=None)
@given(st.text())
def test_gemma_4_text_survives(text: str) -> None:
    tokenizer = _CACHE.setdefault("gemma4", gemma4())
    text = text.encode("utf-8", "ignore").decode().replace("\u2581", " ")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(7))
