"""``millpond tokenize``: text on stdin, token ids on stdout."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from millpond.runtime.cli_arguments import model_of
from millpond.runtime.cli_prompt import read_text
from millpond.runtime.cli_terminal import Terminal, visible

if TYPE_CHECKING:
    from millpond.runtime.tokenizer import Tokenizer

TOKENS_MAX = 2**32
"""Ids are u32; no embedding is looked at here that would bound them further."""


def run(options: Namespace, terminal: Terminal) -> int:
    """Run the command; return its exit code.

    With ``--json`` one object: ``token_ids``, and ``bos``, the id that ``generate --prompt`` would
    put before them, or null.  Else a line per token: id, tab, its text.
    Raises ModelError, InvalidParameter and OutputClosed.
    """
    tokenizer = _load(model_of(options))
    text = read_text("-")
    ids = tokenizer.encode_with_control(text) if options.special else tokenizer.encode(text)
    if options.bos:
        ids = tokenizer.with_bos(ids)
    if options.json:
        terminal.write_json(
            {"token_ids": ids, "bos": tokenizer.bos if tokenizer.adds_bos else None}
        )
        return 0
    pieces = (tokenizer.raw_piece(token_id).decode(errors="backslashreplace") for token_id in ids)
    lines = zip(ids, map(visible, pieces), strict=True)
    terminal.write_text("".join(f"{token_id}\t{piece}\n" for token_id, piece in lines))
    return 0


def _load(path: str) -> Tokenizer:
    """Return the tokenizer of a file; a vocabulary alone, without a model, will do."""
    from millpond.runtime.gguf_file import GgufFile
    from millpond.runtime.tokenizer import make_tokenizer
    from millpond.runtime.vocabulary import read_vocabulary

    with GgufFile.open(path) as file:
        return make_tokenizer(read_vocabulary(file.metadata, TOKENS_MAX))
