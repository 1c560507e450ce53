"""OpenAI's forms of an answer, whole and in chunks.  Pure: results in, JSON bytes out."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from millpond.actors.http.exchange import data_event
from millpond.actors.http.record import RequestRecord

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats.

    kind         ``chat.completion`` or ``text_completion``
    fingerprint  names the model's cache namespace
    """

    id: str
    kind: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    chunk_start: bytes = field(init=False)  # of the JSON of every chunk, encoded once

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        start = msgspec.json.encode(self.fields(kind)).removesuffix(b"}")
        object.__setattr__(self, "chunk_start", start)

    def fields(self, kind: str = "") -> dict[str, Any]:
        """Return the fields of a chunk or of a whole answer."""
        return {
            "id": self.id,
            "object": kind or self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
        }


def new_id(prefix: str) -> str:
    """Return an id that no other answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(record: RequestRecord) -> dict[str, Any]:
    """Return the usage of a request whose choices ended."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


def figures(record: RequestRecord) -> dict[str, Any]:
    """Return what the cache did for a request, milliseconds and counts: our extension."""
    return {
        "ttft_ms": round(record.ttft_ms or 0.0, 3),
        "restore_ms": round(record.restore_ms, 3),
        "prefill_ms": round(record.prefill_ms, 3),
        "decode_ms": round(record.decode_ms, 3),
        "restored_bytes": record.restored_bytes,
        "misses": dict(record.misses),
    }


def chunk(head: AnswerHead, choice: dict[str, Any], with_usage: bool) -> bytes:
    """Return one event with one choice; ``usage`` is null on all but the last where asked for."""
    end = b',"usage":null' if with_usage else b""
    return data_event(
        b'%s,"choices":[%s]%s}' % (head.chunk_start, msgspec.json.encode(choice), end)
    )


def usage_chunk(head: AnswerHead, record: RequestRecord) -> bytes:
    """Return the event that ends a stream with usage: no choice, all counts."""
    found = {"usage": usage(record), "millpond": figures(record)}
    more = msgspec.json.encode(found).removeprefix(b"{")
    return data_event(b'%s,"choices":[],%s' % (head.chunk_start, more))


def whole(head: AnswerHead, choices: list[dict[str, Any]], record: RequestRecord) -> bytes:
    """Return a whole answer."""
    found = head.fields() | {
        "choices": choices,
        "usage": usage(record),
        "millpond": figures(record),
    }
    return msgspec.json.encode(found)
