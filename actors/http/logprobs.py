"""Log-probabilities in the two forms that OpenAI gives them.  Pure."""

from __future__ import annotations

from typing import Any

from millpond.runtime.results import StreamedToken
from millpond.runtime.served import ServedModel


class Logprobs:
    """Gathers the log-probabilities of one choice, and hands out those not handed out yet."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        # mutable state, changed only in add and take
        self._new: list[tuple[int, StreamedToken, str]] = []
        self._offset = 0

    def add(self, token: StreamedToken) -> None:
        """Take a token; one without a log-probability counts for nothing."""
        if token.logprob is not None:
            self._new.append((self._offset, token, self._text(token.token_id)))
        self._offset += len(token.text)

    def chat(self) -> dict[str, Any] | None:
        """Return the new ones as chats have them, None if there is none."""
        found = [
            self._entry(token.token_id, token.logprob.logprob)
            | {"top_logprobs": [self._entry(*one) for one in token.logprob.top]}
            for _, token, _ in self._taken()
            if token.logprob is not None
        ]
        return {"content": found, "refusal": None} if found else None

    def completion(self) -> dict[str, Any] | None:
        """Return the new ones as text completions have them, None if there is none."""
        taken = self._taken()
        if not taken:
            return None
        return {
            "tokens": [text for _, _, text in taken],
            "token_logprobs": [token.logprob and token.logprob.logprob for _, token, _ in taken],
            "top_logprobs": [
                {self._text(other): value for other, value in token.logprob.top}
                for _, token, _ in taken
                if token.logprob is not None
            ],
            "text_offset": [offset for offset, _, _ in taken],
        }

    def _taken(self) -> list[tuple[int, StreamedToken, str]]:
        taken, self._new = self._new, []
        return taken

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._model.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(data)}

    def _text(self, token_id: int) -> str:
        """Part of a character has no text: its bytes are named, as OpenAI does."""
        data = self._model.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
