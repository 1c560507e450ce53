"""``ChatEncoder``: one runtime's chat template, compiled once, and the ids of its chats."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from millpond.runtime.chat import ChatOptions, ChatTemplate, encode_chat, make_chat_template
from millpond.runtime.chat_sandbox import SOURCE_CHARS_MAX
from millpond.runtime.errors import ChatTemplateError, ConfigError
from millpond.runtime.tokenizer import Tokenizer

TEMPLATE_BYTES_MAX = 4 * SOURCE_CHARS_MAX
"""Bytes of a template file: no character takes more than four."""


class ChatEncoder:
    """Messages to token ids; ``encode`` and ``compile`` run on one worker thread.

    source  Jinja text of the template, ``""`` for none
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer, self.source = tokenizer, source
        # mutable state, changed only in compile
        self._template: ChatTemplate | None = None

    def __repr__(self) -> str:
        return f"<ChatEncoder {len(self.source)} characters of template>"

    def compile(self) -> ChatTemplate:
        """Return the template, compiled at the first call; raises ChatTemplateError."""
        if self._template is None:
            if not self.source:
                raise ChatTemplateError("the model file has no chat template; give one of your own")
            self._template = make_chat_template(self._tokenizer, self.source)
        return self._template

    def encode(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None
    ) -> list[int]:
        """Return a chat's ids; raises InvalidParameter and ChatTemplateError."""
        return encode_chat(self._tokenizer, self.compile(), messages, options)


def read_template(path: str) -> str:
    """Return the text of a template file; blocks.  Raises ConfigError."""
    where = f"chat_template {path}"
    try:
        # a pipe without a writer would keep us for ever
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(TEMPLATE_BYTES_MAX + 1) or b""
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: found bytes that are no UTF-8, expected text") from None
    except (OSError, ValueError) as error:
        fault = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where}: {fault}") from None
    if len(data) > TEMPLATE_BYTES_MAX:
        raise ConfigError(f"{where}: found more than {TEMPLATE_BYTES_MAX} bytes")
    if not text.strip():
        raise ConfigError(f"{where}: found no text, expected a Jinja template")
    return text
