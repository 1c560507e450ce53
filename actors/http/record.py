"""``RequestRecord``: what is known of one request, for logs, metrics and the status page."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.runtime.results import Completion


@dataclass(slots=True)
class RequestRecord:
    """One request from its head to its end; no text of a prompt or an answer is in it.

    id             as in the ``x-request-id`` header
    started_s      clock of the event loop, started_at  seconds since the epoch
    model          "" until known
    status         of the response; 499: the client went away first
    code           of the error, "" for none
    ttft_ms        from the request's head to its first token; None before
    """

    id: str
    method: str
    path: str
    started_s: float
    started_at: float
    model: str = ""
    stream: bool = False
    phase: str = "reading"
    status: int = 0
    code: str = ""
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    restored_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)

    def saw_token(self, now_s: float) -> None:
        """Note the first token."""
        if self.ttft_ms is None:
            self.ttft_ms = 1e3 * (now_s - self.started_s)
            self.phase = "decoding"

    def saw_completion(self, done: Completion, is_first_of_prompt: bool) -> None:
        """Add a choice; the choices of one prompt count its tokens once."""
        self.choices += 1
        if is_first_of_prompt:
            self.prompt_tokens += done.usage.prompt_tokens
            self.cached_tokens += done.usage.cached_tokens
        self.completion_tokens += done.usage.completion_tokens
        self.restore_ms += done.timings.restore_ms
        self.prefill_ms += done.timings.prefill_ms
        self.decode_ms += done.timings.decode_ms
        self.restored_bytes += done.restore.bytes
        for reason, count in done.restore.misses.items():
            self.misses[reason] = self.misses.get(reason, 0) + count

    def server_timing(self) -> str:
        """Return the value of a ``Server-Timing`` header, milliseconds; what is known by now."""
        parts = []
        if self.choices:
            parts += [
                ("restore", self.restore_ms),
                ("prefill", self.prefill_ms),
                ("decode", self.decode_ms),
            ]
        if self.ttft_ms is not None:
            parts.append(("ttft", self.ttft_ms))
        return ", ".join(f"{name};dur={value:.3f}" for name, value in parts)

    def line(self) -> str:
        """Return the request as one line of ``name=value``, fit for a log."""
        found: dict[str, object] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": f"{self.duration_ms:.1f}",
        }
        if self.model:
            found["model"] = self.model
        if self.code:
            found["code"] = self.code
        if self.choices:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "ttft_ms": f"{self.ttft_ms or 0.0:.1f}",
                "restore_ms": f"{self.restore_ms:.1f}",
                "prefill_ms": f"{self.prefill_ms:.1f}",
            }
        found |= {f"miss_{reason}": count for reason, count in self.misses.items()}
        return " ".join(f"{name}={_word(str(value))}" for name, value in found.items())


def _word(text: str) -> str:
    """Return a text as one word of a log line: whatever a client sent cannot forge a field."""
    plain = "".join(
        letter if letter.isprintable() and letter not in ' ="' else "_" for letter in text
    )
    return plain[:128]
