"""What the fake model computes: rows and tokens as hashes of everything before them.  Pure.

    state(chunk)  hash of the weights, the chunk's first position and length, and what attention
                  sees there: all rows of the full groups, the last ``sliding_window`` of the others
    row(token)    hash of the chunk's state and of the chunk's ids up to the token; each plane has
                  its own slice of it
    next token    hash of what attention sees behind the token

So the text depends on every row, and on the grid of the chunks: whoever cuts a prompt elsewhere
gets another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.layout import KvLayout, LayerGroup

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a token's row is cut.

    layout  groups and grid
    starts  group ``g`` owns bytes [starts[g], starts[g + 1])
    """

    layout: KvLayout
    starts: tuple[int, ...]

    @classmethod
    def of(cls, layout: KvLayout) -> Shape:
        """Lay the groups' rows of one token behind one another."""
        starts = [0]
        for group in layout.groups:
            starts.append(starts[-1] + group.block_bytes(1))
        return cls(layout, tuple(starts))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all groups."""
        return self.starts[-1]

    def rows(self, group: LayerGroup, packed: bytes) -> Bytes:
        """Cut whole rows, one after another, into (planes, kv_heads, tokens, bytes of head_dim)."""
        whole = np.frombuffer(packed, np.uint8).reshape(-1, self.row_bytes)
        mine = whole[:, self.starts[group.index] : self.starts[group.index + 1]]
        width = group.head_dim * group.dtype.elem_bytes
        return mine.reshape(-1, group.planes, group.kv_heads, width).transpose(1, 2, 0, 3)


def chunk_state(weights: bytes, positions: range, seen: Sequence[bytes]) -> bytes:
    """Hash what the first token of a chunk sees, and the chunk's shape."""
    shape = positions.start.to_bytes(4, "little") + len(positions).to_bytes(4, "little")
    state = hashlib.blake2b(weights + shape, digest_size=16)
    for rows in seen:
        state.update(rows)
    return state.digest()


def chunk_rows(shape: Shape, state: bytes, token_ids: bytes) -> bytes:
    """Return the rows of a chunk's tokens, one whole row after another."""
    chain, rows = xxhash.xxh3_128(state), []
    for start in range(0, len(token_ids), 4):
        chain.update(token_ids[start : start + 4])
        rows.append(hashlib.shake_128(chain.digest()).digest(shape.row_bytes))
    return b"".join(rows)


def last_row(shape: Shape, state: bytes, token_ids: bytes) -> bytes:
    """Return the last row of ``chunk_rows``, which alone is new after a decoded token."""
    chain = xxhash.xxh3_128(state)
    chain.update(token_ids)
    return hashlib.shake_128(chain.digest()).digest(shape.row_bytes)


def next_digest(seen: Sequence[bytes]) -> bytes:
    """Hash what attention sees behind the last token; stands for its logits."""
    digest = xxhash.xxh3_128()
    for rows in seen:
        digest.update(rows)
    return digest.digest()


def reference_rows(shape: Shape, weights: bytes, prompt: Sequence[int]) -> bytes:
    """Return the rows of a whole prompt, one whole row after another."""
    rows, packed, step = b"", pack_tokens(prompt), shape.layout.chunk_tokens
    for first in range(0, len(prompt), step):
        positions = range(first, min(first + step, len(prompt)))
        state = chunk_state(weights, positions, _visible(shape, rows))
        rows += chunk_rows(shape, state, packed[4 * first : 4 * positions.stop])
    return rows


def chosen_token(digest: bytes, vocab: int) -> int:
    """Return the token that a digest stands for."""
    return int.from_bytes(digest[:8], "little") % vocab


def reference_tokens(
    shape: Shape, weights: bytes, prompt: Sequence[int], vocab: int
) -> Iterator[int]:
    """Iterate over the tokens after a prompt, without end, computed from plain lists."""
    rows = reference_rows(shape, weights, prompt)
    first = (len(prompt) - 1) // shape.layout.chunk_tokens * shape.layout.chunk_tokens
    context = pack_tokens(prompt[first:])
    before = _visible(shape, rows[: first * shape.row_bytes])
    state = chunk_state(weights, range(first, len(prompt)), before)
    while True:
        token_id = chosen_token(next_digest(_visible(shape, rows)), vocab)
        yield token_id
        context += pack_tokens([token_id])
        rows += last_row(shape, state, context)


def _visible(shape: Shape, rows: bytes) -> list[bytes]:
    window = shape.layout.sliding_window * shape.row_bytes
    return [
        shape.rows(group, rows if group.is_full else rows[-window:]).tobytes()
        for group in shape.layout.groups
    ]
