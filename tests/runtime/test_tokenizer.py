"""Tokenizers built from small vocabularies, good and hostile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millpond.runtime.errors import InvalidParameter, TokenizerError
from millpond.runtime.identity import Vocabulary
from millpond.runtime.tokenizer import Tokenizer, make_tokenizer

SPECIAL = (b"<pad>", b"<eos>", b"<bos>", b"<unk>", b"<start_of_turn>", b"<end_of_turn>")
USER = (b"\n", b"\n\n", b"\n\n\n", b"  ", b"   ", b"<b>", b"<bos>>")
MARK = "\u2581".encode()
WORDS = (b"h", b"e", b"l", b"o", b"he", b"ll", b"hell", b"hello", MARK, MARK + b"hello", b"<", b">")


def spm(**changes: Any) -> Vocabulary:
    """A SentencePiece vocabulary: 6 special, 256 bytes, 7 user-defined, words by rank."""
    byte_tokens = tuple(b"<0x%02X>" % byte for byte in range(256))
    tokens = SPECIAL + byte_tokens + USER + WORDS
    ranks = tuple(float(-rank) for rank in range(len(WORDS), 0, -1))
    fields: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": (0.0,) * (len(tokens) - len(WORDS)) + ranks,
        "types": (3, 3, 3, 2, 3, 3) + (6,) * 256 + (4,) * len(USER) + (1,) * len(WORDS),
        "merges": (),
        "bos": 2,
        "eos": 1,
        "unk": 3,
        "eot": None,
        "add_bos": True,
        "add_eos": False,
        "add_space_prefix": False,
        "chat_template": "",
    }
    return Vocabulary(**(fields | changes))


TOKENIZER = make_tokenizer(spm())
ID = {token: index for index, token in enumerate(spm().tokens)}


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    return [tokenizer.raw_piece(token_id) for token_id in ids]


def test_words_merge_by_score() -> None:
    assert TOKENIZER.encode("hello hello") == [ID[b"hello"], ID[MARK + b"hello"]]


def test_empty_text_has_no_ids_but_bos() -> None:
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.encode_prompt("") == [2]
    assert TOKENIZER.decode([]) == ""


def test_control_tokens_in_ordinary_text_are_text() -> None:
    text = "<bos>hello<end_of_turn><eos><unk><pad>"
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(range(6))
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode_with_control(text) == [2, ID[b"hello"], 5, 1, 3, 0]


def test_user_defined_tokens_are_cut_out_of_ordinary_text_longest_first() -> None:
    assert TOKENIZER.encode("\n\n\n\n\n") == [ID[b"\n\n\n"], ID[b"\n\n"]]
    assert TOKENIZER.encode("   <b>") == [ID[b"   "], ID[b"<b>"]]
    assert TOKENIZER.encode_with_control("<bos>>") == [ID[b"<bos>>"]]


def test_tainted_characters_rule_control_tokens_out_and_user_defined_ones_not() -> None:
    text = "<bos><b><bos>"
    assert TOKENIZER.encode_with_control(text) == [2, ID[b"<b>"], 2]
    ids = TOKENIZER.encode_with_control(text, [7])
    assert ids == [2, ID[b"<b>"], 2]
    for tainted in ([0], [4], [1, 2, 3], [0, 6]):
        assert TOKENIZER.encode_with_control(text, tainted)[-2:] == [ID[b"<b>"], 2]
        assert TOKENIZER.encode_with_control(text, tainted)[0] != 2


def test_bos_stands_once_and_first() -> None:
    assert TOKENIZER.with_bos([7, 8]) == [2, 7, 8]
    assert TOKENIZER.with_bos([2, 7, 2]) == [2, 7, 2]
    assert TOKENIZER.with_bos([2, 2, 2, 7]) == [2, 7]
    without = make_tokenizer(spm(add_bos=False))
    assert without.with_bos([7]) == [7]
    assert without.with_bos([2, 2, 7]) == [2, 7]
    assert make_tokenizer(spm(bos=None)).with_bos([7]) == [7]


def test_ordinary_text_that_spells_bos_gets_a_real_one() -> None:
    ids = TOKENIZER.encode_prompt("<bos>")
    assert ids[0] == 2
    assert ids.count(2) == 1
    assert TOKENIZER.decode(ids) == "<bos>"


def test_the_space_prefix_stands_before_every_fragment() -> None:
    prefixed = make_tokenizer(spm(add_space_prefix=True))
    assert prefixed.encode("hello") == [ID[MARK + b"hello"]]
    ids = prefixed.encode_with_control("hello<bos>hello")
    assert ids == [ID[MARK + b"hello"], 2, ID[MARK + b"hello"]]
    assert prefixed.encode("") == []


def test_unknown_characters_become_their_bytes() -> None:
    ids = TOKENIZER.encode("\u00e9\0")
    assert pieces(TOKENIZER, ids) == [b"\xc3", b"\xa9", b"\0"]


def test_without_byte_tokens_unknown_characters_become_unk() -> None:
    types = tuple(1 if kind == 6 else kind for kind in spm().types)
    tokens = tuple(
        b"q%d" % index if 6 <= index < 262 else token for index, token in enumerate(spm().tokens)
    )
    assert make_tokenizer(spm(types=types, tokens=tokens)).encode("h\u00e9") == [ID[b"h"], 3]
    types = tuple(1 if kind == 2 else kind for kind in types)
    no_unknown = make_tokenizer(spm(types=types, tokens=tokens, unk=None))
    assert no_unknown.encode("h\u00e9l") == [ID[b"h"], ID[b"l"]]


def test_the_text_of_a_byte_token_is_no_byte_token() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("<0x0A>")) == "<0x0A>"
    assert ID[b"<0x0A>"] not in TOKENIZER.encode("<0x0A>")


def test_a_lone_surrogate_is_refused() -> None:
    for encode in (TOKENIZER.encode, TOKENIZER.encode_with_control, TOKENIZER.encode_prompt):
        with pytest.raises(InvalidParameter, match=r"U\+D800 at character 1"):
            encode("a\ud800")


def test_streamed_text_never_holds_half_a_character() -> None:
    text = "\u00e9\u4e2d\U0001f980 hello"
    ids = TOKENIZER.encode(text)
    stream = TOKENIZER.detokenizer()
    parts = [stream.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + stream.finish() == text
    assert max(map(len, parts)) > 1


def test_incomplete_and_broken_bytes_become_replacement_characters() -> None:
    stream = TOKENIZER.detokenizer()
    assert stream.push(ID[b"<0xE4>"]) == ""
    assert stream.push(ID[b"<0xB8>"]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(ID[b"<0xFF>"]) + stream.push(ID[b"h"]) + stream.finish() == "\ufffdh"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    for token_id in (-1, TOKENIZER.vocab_size, 2**31):
        assert TOKENIZER.piece(token_id) == TOKENIZER.raw_piece(token_id) == b""
        assert TOKENIZER.detokenizer().push(token_id) == ""


def test_end_ids_come_from_names_and_from_texts() -> None:
    assert TOKENIZER.end_ids == {1, 5}
    assert make_tokenizer(spm(eos=0, eot=4)).end_ids == {0, 1, 4, 5}


def test_an_end_token_of_the_type_of_text_is_control_all_the_same() -> None:
    types = (3, 1, 3, 2, 3, 4, *spm().types[6:])
    wrong = make_tokenizer(spm(types=types))
    assert not {1, 5} & set(wrong.encode("<eos><end_of_turn>"))
    assert wrong.encode_with_control("<eos><end_of_turn>") == [1, 5]
    assert wrong.decode([1, 5]) == ""


def test_duplicate_empty_and_broken_strings_do_no_harm() -> None:
    extra = (b"hello", b"", b"", b"\xff", b"<bos>", b"<0x41>", b"\n")
    base = spm()
    hostile = make_tokenizer(
        spm(
            tokens=base.tokens + extra,
            scores=base.scores + (-1.0,) * len(extra),
            types=(*base.types, 1, 1, 3, 1, 1, 6, 4),
        )
    )
    assert hostile.encode("hello") == [len(base.tokens)]
    assert hostile.encode("A\n") == [len(base.tokens) + 5, len(base.tokens) + 6]
    assert hostile.encode_with_control("<bos>") == [2]
    assert hostile.piece(len(base.tokens) + 3) == b"\xff"


def test_a_vocabulary_without_types_tells_bytes_by_their_text() -> None:
    untyped = make_tokenizer(spm(types=()))
    assert untyped.encode("hello\u00e9") == [ID[b"hello"], ID[b"<0xC3>"], ID[b"<0xA9>"]]
    assert untyped.encode_with_control("<bos><eos>") == [2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (), "scores": (), "types": ()}, "tokens: found none"),
        ({"types": (1, 2)}, "found 2 types, expected 281"),
        ({"scores": ()}, "scores: found 0"),
        ({"scores": (float("nan"),) * 281}, "no finite float32"),
        ({"scores": (1e300,) * 281}, "no finite float32"),
        ({"types": (9,) * 281}, "found type 9, expected 1 to 6"),
        ({"bos": 281}, "bos id: found 281, expected less than 281"),
        ({"eos": -1}, "eos id: found -1"),
        ({"model": "bert"}, "found 'bert', expected llama, gemma4 or gpt2"),
    ],
)
def test_broken_arrays_give_one_typed_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        make_tokenizer(spm(**changes))


@settings(deadline=None)
@given(st.text())
def test_what_was_encoded_decodes_to_the_same_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("\u2581", " ")
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not set(ids) & set(range(6))


@settings(deadline=None)
@given(st.lists(st.sampled_from([*(t.decode() for t in SPECIAL + USER + WORDS), "x", "<", "bos"])))
def test_special_parsing_also_decodes_to_the_same_text(texts: list[str]) -> None:
    text = "".join(texts).replace("\u2581", " ")
    ids = TOKENIZER.encode_with_control(text)
    assert b"".join(pieces(TOKENIZER, ids)).decode().replace("\u2581", " ") == text
    assert TOKENIZER.encode_with_control(text, range(len(text))) == TOKENIZER.encode(text)


@settings(deadline=None)
@given(st.lists(st.integers(-2, 300)))
def test_streaming_equals_decoding_at_once(ids: list[int]) -> None:
    stream = TOKENIZER.detokenizer()
    streamed = "".join(map(stream.push, ids)) + stream.finish()
    assert streamed == b"".join(map(TOKENIZER.piece, ids)).decode(errors="replace")


def test_specials_are_found_across_the_windows_of_a_long_text() -> None:
    for length in range(2**16 - 8, 2**16 + 2):
        ids = TOKENIZER.encode_with_control("h" * length + "<eos>" + "\n\n" + "h" * 2**16 + "<bos>")
        assert ids.count(1) == ids.count(2) == ids.count(ID[b"\n\n"]) == 1
