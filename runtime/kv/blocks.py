"""Tokens to chain hashes.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from millpond.codecs.fingerprint import chain_hash


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32; raises OverflowError on an id that does not fit."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the ids of little-endian u32 bytes."""
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids


def block_chain(
    fingerprint: bytes, root: bytes, token_ids: bytes, block_tokens: int
) -> tuple[bytes, ...]:
    """Return the chain hash of each whole block of a packed prompt, first block first."""
    size = 4 * block_tokens
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - size + 1, size):
        parent = chain_hash(fingerprint, parent, token_ids[start : start + size])
        hashes.append(parent)
    return tuple(hashes)
