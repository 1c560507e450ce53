"""``Oracle``: what must come out of a simulated world, computed without any actor, index or cache.

Chain hashes, paths and payloads are made here from their definitions, not by the code under test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.testing.fake_rows import Shape, reference_rows, reference_tokens
from millpond.runtime.testing.world_plan import VOCAB, RequestPlan

END_ID = 0
FINGERPRINT = hashlib.sha256(b"millpond simulation").digest()


def weights_of(model: int) -> bytes:
    """Return the weights of a fake model."""
    return hashlib.sha256(b"weights %d" % model).digest()


def guard_of(model: int) -> bytes:
    """Return a model's guard: every model has the same fingerprint, as files of one name may."""
    return hashlib.sha256(b"guard " + weights_of(model)).digest()


def text_of(token_id: int) -> str:
    """Return a token's text: one character, none for the end."""
    return "" if token_id == END_ID else chr(33 + token_id)


class Letters:
    """Tokenizer and detokenizer of the fake model."""

    vocab_size = VOCAB

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [ord(letter) - 33 for letter in text]

    def detokenizer(self) -> Letters:
        """Return a detokenizer; it has no state."""
        return self

    def push(self, token_id: int) -> str:
        """Return a token's text."""
        return text_of(token_id)

    def finish(self) -> str:
        """Return what is held back: nothing."""
        return ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request must get."""

    token_ids: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """A block file that may exist.

    path, parent  of the file and of the file before it, empty for a first block
    payload       its bytes
    is_full       of a full-attention group
    """

    path: str
    parent: str
    payload: bytes
    is_full: bool


class Oracle:
    """Knows every block and every answer of the requests that it was shown."""

    def __init__(self, layout: KvLayout, context_tokens: int) -> None:
        self._layout, self._shape, self._context = layout, Shape.of(layout), context_tokens
        # mutable state: what was computed already
        self._rows: dict[tuple[int, tuple[int, ...]], bytes] = {}
        self._answers: dict[tuple[object, ...], Answer] = {}
        self.blocks: dict[str, KnownBlock] = {}
        self.children: dict[str, list[str]] = {}

    def learn(self, model: int, request: RequestPlan) -> None:
        """Work out the blocks that a request may write."""
        tokens, shape, chunk = self._layout.block_tokens, self._shape, self._layout.chunk_tokens
        whole = len(request.prompt) // chunk * chunk // tokens  # blocks of whole chunks only
        chain = self.chain(model, request)[:whole]
        rows = self._rows_of(model, request.prompt)
        for group in self._layout.groups:
            parent = ""
            for index, name in enumerate(chain):
                path = self.path(group, name)
                if path not in self.blocks:
                    first, end = index * tokens, (index + 1) * tokens
                    packed = rows[first * shape.row_bytes : end * shape.row_bytes]
                    payload = shape.rows(group, packed).tobytes()
                    self.blocks[path] = KnownBlock(path, parent, payload, group.is_full)
                    if parent and group.is_full:
                        self.children.setdefault(parent, []).append(path)
                parent = path

    def chain(self, model: int, request: RequestPlan) -> list[bytes]:
        """Return the chain hashes of a prompt's whole blocks."""
        root = FINGERPRINT + guard_of(model) + b"exact" + request.salt.encode()
        parent, found = hashlib.sha256(root).digest(), []
        for index in range(len(request.prompt) // self._layout.block_tokens):
            ids = request.prompt[index * self._layout.block_tokens :][: self._layout.block_tokens]
            packed = b"".join(one.to_bytes(4, "little") for one in ids)
            parent = hashlib.sha256(FINGERPRINT + parent + packed).digest()
            found.append(parent)
        return found

    def path(self, group: LayerGroup, name: bytes) -> str:
        """Return where a block lies under the root."""
        digits = name.hex()
        folder = f"v1/{FINGERPRINT.hex()[:16]}/{group.name}"
        return f"{folder}/{digits[:2]}/{digits}.safetensors"

    def boundary(self, model: int, request: RequestPlan, is_there: Callable[[str], bool]) -> int:
        """Return how many tokens a hit may have, given which files are there and whole."""
        layout, chain = self._layout, self.chain(model, request)
        limit = (len(request.prompt) - 1) // layout.chunk_tokens * layout.chunk_tokens
        for boundary in range(limit, 0, -layout.chunk_tokens):
            if all(
                is_there(self.path(group, name)) for group, name in self._needs(chain, boundary)
            ):
                return boundary
        return 0

    def answer(self, model: int, request: RequestPlan) -> Answer:
        """Return what the request gets if nothing goes wrong."""
        key = (model, request.prompt, request.max_tokens, request.stop, request.ignore_eos)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._answer(model, request)
        return found

    def _answer(self, model: int, request: RequestPlan) -> Answer:
        count = min(request.max_tokens, self._context - len(request.prompt))
        endless = reference_tokens(self._shape, weights_of(model), request.prompt, VOCAB)
        ids = list(islice(endless, count))
        text = ""
        for place, token_id in enumerate(ids, 1):
            text += text_of(token_id)
            cut = min((at for at in map(text.find, request.stop) if at >= 0), default=-1)
            if cut >= 0:
                return Answer(tuple(ids[:place]), text[:cut], "stop")
            if token_id == END_ID and not request.ignore_eos:
                return Answer(tuple(ids[:place]), text, "stop")
        return Answer(tuple(ids), text, "length")

    def _rows_of(self, model: int, prompt: tuple[int, ...]) -> bytes:
        rows = self._rows.get((model, prompt))
        if rows is None:
            rows = reference_rows(self._shape, weights_of(model), prompt)
            self._rows[model, prompt] = rows
        return rows

    def _needs(self, chain: Sequence[bytes], boundary: int) -> list[tuple[LayerGroup, bytes]]:
        """Full groups need every block below the boundary, sliding ones the last window's."""
        layout, needed = self._layout, []
        for group in layout.groups:
            seen = range(boundary)
            if not group.is_full:
                seen = range(max(0, boundary - layout.sliding_window), boundary)
            indexes = sorted({token // layout.block_tokens for token in seen})
            needed += [(group, chain[index]) for index in indexes]
        return needed
