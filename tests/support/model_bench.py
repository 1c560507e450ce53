"""A runner over a tiny model, driven by steps without any actor: prompts, blocks out, blocks in."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from millpond.codecs.choices import SamplingParams
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.layout import KvLayout, LayerGroup
from millpond.runtime.steps import (
    DecodeToken,
    PrefillChunk,
    RestorePlanes,
    Sampled,
    SnapshotPlanes,
    Step,
    StepResult,
)
from millpond.runtime.testing.direct import load_direct

GREEDY = SamplingParams(digest_logits=True)
Blocks = dict[tuple[int, int], bytes]  # (group, block index) → payload


def prompt(length: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(4, 500, size=length).tolist()
    return [2, *ids[1:]]


@dataclass
class Bench:
    """A loaded model and the layout of its cache."""

    model: Any
    layout: KvLayout

    @classmethod
    def load(cls, path: Path, **more: Any) -> Bench:
        _, layout, model = load_direct(path, RuntimeConfig(model=str(path), spill=False, **more))
        return cls(model, layout)

    def decoding_together(self, count: int) -> Bench:
        """The same weights, decoding up to ``count`` sequences together."""
        twin = copy.copy(self.model)
        twin._decode_batch, twin._caches = count, {}
        return Bench(twin, self.layout)

    def run(self, **parts: Any) -> StepResult:
        return self.model.run(Step(**parts))

    def good(self, **parts: Any) -> StepResult:
        result = self.run(**parts)
        assert result.failures == {}
        return result

    def chunks(
        self, ids: Sequence[int], first: int = 0, sequence: int = 1
    ) -> Iterator[PrefillChunk]:
        """The grid's chunks from ``first`` on; the last one asks for a token."""
        size = self.layout.chunk_tokens
        for start in range(first, len(ids), size):
            end = min(start + size, len(ids))
            yield PrefillChunk(
                sequence_id=sequence,
                first_token=start,
                token_ids=pack_tokens(ids[start:end]),
                sample=GREEDY if end == len(ids) else None,
                context_tokens=len(ids) + 16,
            )

    def snapshots(self, chunk: PrefillChunk) -> list[SnapshotPlanes]:
        """Every whole block of a chunk, of every group."""
        size, tokens = self.layout.block_tokens, len(chunk.token_ids) // 4
        found = []
        for first in range(chunk.first_token, chunk.first_token + tokens - size + 1, size):
            for group in self.layout.groups:
                payload = memoryview(bytearray(group.block_bytes(size)))
                found.append(
                    SnapshotPlanes(
                        chunk.sequence_id, group.index, first, size, 0, group.planes, payload
                    )
                )
        return found

    def cold(self, ids: Sequence[int], sequence: int = 1) -> tuple[Sampled, Blocks]:
        """Prefill a prompt from its first token; return its token and all of its blocks."""
        blocks: Blocks = {}
        sampled: tuple[Sampled, ...] = ()
        for chunk in self.chunks(ids, sequence=sequence):
            wanted = self.snapshots(chunk)
            result = self.good(prefills=(chunk,), snapshots=tuple(wanted))
            sampled = result.sampled
            for one in wanted:
                index = one.first_token // self.layout.block_tokens
                blocks[one.group, index] = bytes(one.payload)
        return sampled[0], blocks

    def restores(self, blocks: Blocks, boundary: int, sequence: int = 1) -> list[RestorePlanes]:
        """What a hit up to ``boundary`` copies in, one part of a block for each half of its planes."""
        return [
            self.restore(blocks, group, index, planes, sequence)
            for group in self.layout.groups
            for index in self.layout.blocks_for(group, boundary)
            for planes in halves(group)
        ]

    def restore(
        self,
        blocks: Blocks,
        group: LayerGroup,
        index: int,
        planes: tuple[int, int],
        sequence: int = 1,
    ) -> RestorePlanes:
        size, plane_bytes = self.layout.block_tokens, group.plane_bytes(self.layout.block_tokens)
        payload = blocks[group.index, index][
            planes[0] * plane_bytes : (planes[0] + planes[1]) * plane_bytes
        ]
        return RestorePlanes(
            sequence_id=sequence,
            group=group.index,
            first_token=index * size,
            tokens=size,
            first_plane=planes[0],
            planes=planes[1],
            payload=memoryview(payload),
            starts_over=False,
            context_tokens=4096,
        )

    def warm(self, ids: Sequence[int], blocks: Blocks, sequence: int = 1) -> Sampled:
        """Restore as much as a prompt may reuse, prefill the rest."""
        boundary = self.layout.reuse_limit(len(ids))
        self.good(frees=(sequence,))
        for one in self.restores(blocks, boundary, sequence):
            self.good(restores=(one,))
        sampled: tuple[Sampled, ...] = ()
        for chunk in self.chunks(ids, boundary, sequence):
            sampled = self.good(prefills=(chunk,)).sampled
        return sampled[0]

    def decode(self, first: Sampled, length: int, steps: int, sequence: int = 1) -> list[Sampled]:
        """Go on after a prompt of ``length`` tokens."""
        found = [first]
        for step in range(1, steps + 1):
            one = token(found[-1], length + step - 1, step, sequence)
            found += self.good(decodes=(one,)).sampled
        return found[1:]


def token(before: Sampled, position: int, step: int, sequence: int = 1) -> DecodeToken:
    return DecodeToken(
        sequence_id=sequence,
        position=position,
        token_id=before.token_id,
        sample=GREEDY,
        step=step,
    )


def halves(group: LayerGroup) -> list[tuple[int, int]]:
    half = group.planes // 2
    return [(0, half), (half, group.planes - half)]
