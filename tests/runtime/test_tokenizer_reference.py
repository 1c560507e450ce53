"""Every recorded tokenisation of llama.cpp, with the tiny and both real vocabularies."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from millpond.codecs.gguf import parse_header
from millpond.runtime.tokenizer import Tokenizer, make_tokenizer
from millpond.runtime.vocabulary import read_vocabulary

Cases = list[dict[str, Any]]


def tokenizer_of(header: bytes) -> Tokenizer:
    metadata = parse_header(header, len(header)).metadata
    return make_tokenizer(read_vocabulary(metadata, 2**20))


def check_all(tokenizer: Tokenizer, cases: Cases) -> None:
    assert len(cases) >= 40
    for case in cases:
        text = case["text"]
        with_control = tokenizer.encode_with_control(text)
        assert tokenizer.encode(text) == case["parse_special_false"], text
        assert with_control == case["parse_special_true"], text
        # llama.cpp writes BOS twice if the text begins with it; here it stands once
        expected = case["with_bos"]
        twice = expected[:2] == [tokenizer.bos, tokenizer.bos]
        assert tokenizer.with_bos(with_control) == expected[1 if twice else 0 :], text
        assert b"".join(map(tokenizer.raw_piece, with_control)).hex() == case["detok_special"]
        assert b"".join(map(tokenizer.piece, with_control)).hex() == case["detok_plain"]
        plain = bytes.fromhex(case["detok_plain"]).decode(errors="replace")
        assert tokenizer.decode(with_control) == plain


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_tiny_vocabularies_agree_with_llama_cpp(shared_reference: Path, family: str) -> None:
    fixtures = shared_reference / "fixtures"
    recorded = json.loads((fixtures / "tiny-tokenizers.json").read_text())[family]
    header = (fixtures / recorded["vocab_from"]).read_bytes()
    check_all(tokenizer_of(header), recorded["cases"])


def test_the_real_gemma_4_vocabulary_agrees_with_llama_cpp(shared_reference: Path) -> None:
    fixtures = shared_reference / "fixtures"
    header = lzma.decompress((fixtures / "ggml-vocab-gemma-4.gguf.xz").read_bytes())
    tokenizer = tokenizer_of(header)
    check_all(tokenizer, json.loads((fixtures / "gemma4-vocab-tokens.json").read_text())["cases"])
    # the tokens that end a turn, though the file calls one USER_DEFINED and names another
    assert tokenizer.end_ids == {1, 50, 106}
    assert 50 not in tokenizer.encode("<|tool_response>")
    assert tokenizer.encode_with_control("<|tool_response>") == [50]
    # a run of newlines that is a token is taken whole
    assert tokenizer.encode("a\n\n\n\nb")[1:-1] == [110]


@pytest.mark.real
def test_the_real_gemma_3_vocabulary_agrees_with_llama_cpp(shared_reference: Path) -> None:
    model = Path(
        os.environ.get("MILLPOND_TEST_MODEL")
        or Path(__file__).resolve().parents[2] / "models" / "gemma3-270m.gguf"
    )
    if not model.is_file():
        pytest.skip(f"no model file at {model}")
    with model.open("rb") as file:
        header = file.read(32 * 2**20)
    metadata = parse_header(header, model.stat().st_size).metadata
    tokenizer = make_tokenizer(read_vocabulary(metadata, 2**20))
    cases = json.loads((shared_reference / "fixtures/gemma3-270m-tokens.json").read_text())["cases"]
    check_all(tokenizer, cases)
    assert tokenizer.end_ids == {1, 106}
    assert tokenizer.encode("</s>") == [212]  # an HTML tag here, no end of text
