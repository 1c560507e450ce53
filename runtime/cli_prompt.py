"""Texts and token ids that a command reads: bounded, and checked before a model is loaded."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Annotated

import msgspec
from millpond.runtime.config import MIB
from millpond.runtime.errors import EmptyPrompt, InvalidParameter

PROMPT_BYTES_MAX = 16 * MIB
"""Bytes of a prompt, as text or as JSON: about four million tokens, beyond every known context."""

TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


def read_prompt(options: Namespace) -> str | list[int]:
    """Return the prompt that the flags name: text, or token ids.

    Raises EmptyPrompt; InvalidParameter for a file that cannot be read, is too large, or does not
    hold what it should.
    """
    if hasattr(options, "prompt"):
        return _not_empty(_encodable(options.prompt))
    if hasattr(options, "prompt_file"):
        return _not_empty(read_text(options.prompt_file))
    return read_token_ids(options.token_ids_file)


def read_text(path: str) -> str:
    """Return a file's text as it is, ``-`` being stdin; raises InvalidParameter."""
    data = _read(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"{_shown(path)}: found byte 0x{data[error.start]:02x} at offset {error.start}, "
            "expected text in UTF-8"
        ) from None


def read_token_ids(path: str) -> list[int]:
    """Return the ids of a JSON list, one at least; raises InvalidParameter or EmptyPrompt."""
    try:
        ids: list[int] = msgspec.json.decode(_read(path), type=TokenIds)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(
            f"{_shown(path)}: {error}; expected a JSON list of token ids"
        ) from None
    if not ids:
        raise EmptyPrompt(f"{_shown(path)}: found no token, expected at least one")
    return ids


def _read(path: str) -> bytes:
    try:
        if path == "-":
            descriptor = os.dup(sys.stdin.fileno() if sys.stdin is not None else -1)
        else:
            descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read(PROMPT_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        fault = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidParameter(f"{_shown(path)}: {fault}") from None
    if len(data) > PROMPT_BYTES_MAX:
        raise InvalidParameter(
            f"{_shown(path)}: found more than {PROMPT_BYTES_MAX} bytes, the most that a prompt has"
        )
    return data


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter("prompt: found bytes that are not UTF-8, expected text") from None
    return text


def _not_empty(text: str) -> str:
    if not text:
        raise EmptyPrompt("prompt: found no text, expected at least one character")
    return text


def _shown(path: str) -> str:
    return "stdin" if path == "-" else path
