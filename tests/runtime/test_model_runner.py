"""The runner over MLX, step by step: warm equals cold bit for bit, and a bad sequence harms no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from millpond.codecs.choices import SamplingParams
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.model import Model
from millpond.runtime.steps import (
    DecodeToken,
    PrefillChunk,
    RestorePlanes,
    SnapshotPlanes,
    Step,
    StepResult,
)
from millpond.runtime.testing.direct import chunks, load_direct

GREEDY = SamplingParams(digest_logits=True)
DRAWN = SamplingParams(digest_logits=True, temperature=1.5, top_p=0.95, seed=11)
STEPS = 8
LENGTHS = (255, 256, 257, 511, 512, 513, 700, 1024, 1025, 2000)
Block = tuple[int, int, int]  # group, first token, first plane
Answer = tuple[list[int], list[bytes]]  # tokens, digests of their logits


def prompt(length: int, seed: int = 1) -> list[int]:
    ids = np.random.default_rng(seed).integers(4, 500, size=length).tolist()
    return [2, *ids[1:]]


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


@dataclass
class Bench:
    """A loaded model and what is needed to ask it.

    slot_bytes  a block passes in parts of at most so many bytes
    """

    model: Model
    layout: KvLayout
    slot_bytes: int = 1 << 30
    blocks: dict[Block, bytes] = field(default_factory=dict)

    def run(self, step: Step) -> StepResult:
        found = self.model.run(step)
        assert found.failures == {}
        return found

    def chunk(
        self, sequence_id: int, ids: Sequence[int], part: range, sampling: SamplingParams = GREEDY
    ) -> PrefillChunk:
        return PrefillChunk(
            sequence_id=sequence_id,
            first_token=part.start,
            token_ids=packed(ids[part.start : part.stop]),
            sample=sampling if part.stop == len(ids) else None,
            context_tokens=4096,
        )

    def snapshots(self, sequence_id: int, part: range) -> list[SnapshotPlanes]:
        block = self.layout.block_tokens
        return [
            SnapshotPlanes(
                sequence_id=sequence_id,
                group=group.index,
                first_token=first,
                tokens=block,
                first_plane=plane,
                planes=planes,
                payload=memoryview(bytearray(planes * group.plane_bytes(block))),
            )
            for first in range(part.start, part.stop - block + 1, block)
            for group in self.layout.groups
            for plane, planes in group.parts(block, self.slot_bytes)
        ]

    def cold(self, ids: Sequence[int], sequence_id: int = 1, steps: int = STEPS) -> Answer:
        """Prefill on the grid, take every block as it becomes full, decode."""
        self.blocks = {}
        for part in chunks(len(ids), self.layout.chunk_tokens):
            taken = self.snapshots(sequence_id, part)
            found = self.run(
                Step(prefills=(self.chunk(sequence_id, ids, part),), snapshots=tuple(taken))
            )
            for one, digest in zip(taken, found.snapshot_xxh3, strict=True):
                assert digest == xxhash.xxh3_128_digest(one.payload)
                self.blocks[one.group, one.first_token, one.first_plane] = bytes(one.payload)
        return self.decode(sequence_id, len(ids), found, steps)

    def warm(
        self, ids: Sequence[int], boundary: int, blocks: dict[Block, bytes], steps: int = STEPS
    ) -> Answer:
        """Restore what a boundary needs, prefill the rest, decode."""
        for one in self.restores(1, boundary, blocks):
            self.run(Step(restores=(one,)))
        for part in chunks(len(ids), self.layout.chunk_tokens):
            if part.start >= boundary:
                found = self.run(Step(prefills=(self.chunk(1, ids, part),)))
        return self.decode(1, len(ids), found, steps)

    def restores(
        self, sequence_id: int, boundary: int, blocks: dict[Block, bytes]
    ) -> list[RestorePlanes]:
        block, found = self.layout.block_tokens, []
        for group in self.layout.groups:
            for index in self.layout.blocks_for(group, boundary):
                for plane, planes in group.parts(block, self.slot_bytes):
                    payload = memoryview(blocks[group.index, index * block, plane])
                    one = RestorePlanes(
                        sequence_id=sequence_id,
                        group=group.index,
                        first_token=index * block,
                        tokens=block,
                        first_plane=plane,
                        planes=planes,
                        payload=payload,
                        starts_over=not found,
                        context_tokens=4096,
                    )
                    found.append(one)
        return found

    def decode(self, sequence_id: int, length: int, found: StepResult, steps: int) -> Answer:
        tokens, digests = [], []
        for step in range(1, steps + 1):
            (one,) = found.sampled
            tokens.append(one.token_id)
            digests.append(one.logits_xxh3)
            token = DecodeToken(sequence_id, length + step - 1, one.token_id, GREEDY, step)
            found = self.run(Step(decodes=(token,)))
        tokens.append(found.sampled[0].token_id)
        digests.append(found.sampled[0].logits_xxh3)
        self.run(Step(frees=(sequence_id,)))
        assert all(digests)
        return tokens, digests


def bench(path: Path, block: int = 256, chunk: int = 256, kv_dtype: str = "f32") -> Bench:
    config = RuntimeConfig(
        model=str(path),
        block_tokens=block,
        prefill_chunk_tokens=chunk,
        sliding_boundary_tokens=0,
        kv_dtype=kv_dtype,
    )
    _, layout, model = load_direct(path, config)
    return Bench(model, layout)


@pytest.fixture(scope="module")
def tiny(shared_reference: Path) -> Path:
    """Six layers, five of them with a window of 16 tokens."""
    return shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"


@pytest.fixture(scope="module")
def small_grid(tiny: Path) -> Bench:
    return bench(tiny, 16, 32)


# -- warm equals cold


def test_every_length_around_a_border_is_bitwise_equal(tiny: Path) -> None:
    cold, warm = bench(tiny), bench(tiny)
    for length in LENGTHS:
        ids = prompt(length, seed=length)
        boundary = cold.layout.reuse_limit(length)
        assert boundary == (length - 1) // 256 * 256
        assert cold.cold(ids) == warm.warm(ids, boundary, cold.blocks), length


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_every_residue_of_the_ring_is_bitwise_equal(tiny: Path, chunk: int, kv_dtype: str) -> None:
    """The window is 16 tokens and a block has as many."""
    cold, warm = bench(tiny, 16, chunk, kv_dtype), bench(tiny, 16, chunk, kv_dtype)
    for length in range(2 * chunk - 1, 2 * chunk + 18):
        ids = prompt(length, seed=length)
        expected = cold.cold(ids, steps=5)
        boundary = cold.layout.reuse_limit(length)
        assert warm.warm(ids, boundary, cold.blocks, steps=5) == expected, length


@pytest.mark.parametrize("stem", ["gemma4-ple-tiny-f32", "gemma4-moe-tiny-f32"])
def test_every_boundary_of_a_prompt_is_bitwise_equal(shared_reference: Path, stem: str) -> None:
    """Shared K and V, two head sizes, experts; more decode steps than the window has tokens."""
    path = shared_reference / "fixtures" / f"{stem}.gguf"
    cold, warm = bench(path, 8, 24), bench(path, 8, 24)
    ids = prompt(101)
    expected = cold.cold(ids, steps=20)
    for boundary in range(0, 97, 24):
        assert warm.warm(ids, boundary, cold.blocks, steps=20) == expected, boundary


def test_planes_cut_in_parts_are_the_planes_of_the_whole_block(tiny: Path) -> None:
    whole = bench(tiny, 16, 32)
    parts = bench(tiny, 16, 32)
    group = whole.layout.groups[0]
    parts.slot_bytes = 3 * group.plane_bytes(16) + 1
    ids = prompt(100)
    expected = whole.cold(ids)
    assert parts.cold(ids) == expected
    assert len(parts.blocks) > len(whole.blocks)
    for (index, first, plane), payload in whole.blocks.items():
        assert plane == 0
        pieces = sorted(key for key in parts.blocks if key[:2] == (index, first))
        assert b"".join(parts.blocks[key] for key in pieces) == payload
    assert parts.warm(ids, 96, dict(parts.blocks)) == expected


def test_one_flipped_bit_of_a_restored_block_changes_the_logits(small_grid: Bench) -> None:
    """What the tests above compare does depend on the rows."""
    ids = prompt(70)
    expected = small_grid.cold(ids)
    blocks = dict(small_grid.blocks)
    (last, *_) = sorted(key for key in blocks if key[1] == 48)
    payload = bytearray(blocks[last])
    payload[-2] ^= 0x40
    blocks[last] = bytes(payload)
    assert small_grid.warm(ids, 64, blocks)[1] != expected[1]


def test_a_restore_that_starts_over_forgets_what_was_there(small_grid: Bench) -> None:
    ids, other = prompt(70), prompt(90, seed=5)
    small_grid.cold(other)
    wrong = dict(small_grid.blocks)
    expected = small_grid.cold(ids)
    blocks = dict(small_grid.blocks)
    for one in small_grid.restores(1, 64, wrong)[:3]:
        small_grid.run(Step(restores=(one,)))
    assert small_grid.warm(ids, 64, blocks) == expected
    small_grid.run(Step(prefills=(small_grid.chunk(1, other, range(32)),)))
    assert small_grid.warm(ids, 64, blocks) == expected


def test_a_staging_slot_may_be_reused_as_soon_as_the_step_is_over(small_grid: Bench) -> None:
    ids = prompt(70)
    expected = small_grid.cold(ids)
    blocks, slots = dict(small_grid.blocks), []
    for one in small_grid.restores(1, 64, blocks):
        slot = bytearray(one.payload)
        small_grid.run(Step(restores=(replace(one, payload=memoryview(slot)),)))
        slot[:] = bytes(len(slot))
        slots.append(slot)
    found = small_grid.run(Step(prefills=(small_grid.chunk(1, ids, range(64, 70)),)))
    assert small_grid.decode(1, 70, found, STEPS) == expected


# -- several sequences


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_interleaved_sequences_answer_as_each_alone(
    small_grid: Bench, sampling: SamplingParams
) -> None:
    lengths = (5, 16, 33, 64, 97)
    prompts = {index: prompt(length, seed=length) for index, length in enumerate(lengths)}
    alone = {
        index: interleaved(small_grid, {index: ids}, sampling)[index]
        for index, ids in prompts.items()
    }
    assert interleaved(small_grid, prompts, sampling) == alone


def interleaved(
    on: Bench, prompts: dict[int, list[int]], sampling: SamplingParams
) -> dict[int, list[tuple[int, bytes]]]:
    """One chunk or one token of every sequence in each step; those that are done go on decoding."""
    waiting = {
        index: list(chunks(len(ids), on.layout.chunk_tokens)) for index, ids in prompts.items()
    }
    found: dict[int, list[tuple[int, bytes]]] = {index: [] for index in prompts}
    while any(len(tokens) < STEPS for tokens in found.values()):
        prefills, decodes = [], []
        for index, ids in prompts.items():
            if waiting[index]:
                prefills.append(on.chunk(index, ids, waiting[index].pop(0), sampling))
            elif len(found[index]) < STEPS:
                step = len(found[index])
                at = len(ids) + step - 1
                decodes.append(DecodeToken(index, at, found[index][-1][0], sampling, step))
        result = on.run(Step(prefills=tuple(prefills), decodes=tuple(decodes)))
        for one in result.sampled:
            found[one.sequence_id].append((one.token_id, one.logits_xxh3))
    on.run(Step(frees=tuple(prompts)))
    return found


def failing_steps(on: Bench, ids: list[int]) -> dict[str, Step]:
    """Steps that sequence 2, which holds 32 tokens, cannot take."""
    (snapshot, *_) = on.snapshots(2, range(32))
    restore = RestorePlanes(2, 0, 32, 16, 0, 1, memoryview(bytes(10)), False, 4096)
    chunk = on.chunk(2, ids, range(32, 64))
    token = DecodeToken(2, 32, 5, GREEDY, 1)
    return {
        "a chunk that leaves a gap": Step(prefills=(replace(chunk, first_token=48),)),
        "a chunk that overlaps": Step(prefills=(replace(chunk, first_token=16),)),
        "an empty chunk": Step(prefills=(replace(chunk, token_ids=b""),)),
        "a chunk of broken ids": Step(prefills=(replace(chunk, token_ids=b"abc"),)),
        "an id beyond the vocabulary": Step(prefills=(replace(chunk, token_ids=packed([512])),)),
        "a token at a wrong place": Step(decodes=(replace(token, position=31),)),
        "a token beyond the vocabulary": Step(decodes=(replace(token, token_id=1 << 31),)),
        "a payload too short": Step(restores=(restore,)),
        "a group that is not there": Step(restores=(replace(restore, group=9),)),
        "planes that are not there": Step(restores=(replace(restore, first_plane=99),)),
        "rows that are not there": Step(snapshots=(replace(snapshot, first_token=32),)),
        "rows before the first": Step(snapshots=(replace(snapshot, first_token=-16),)),
        "a slot of another size": Step(
            snapshots=(replace(snapshot, payload=memoryview(bytearray(8))),)
        ),
        "a slot that is read-only": Step(
            snapshots=(replace(snapshot, payload=memoryview(bytes(snapshot.payload))),)
        ),
    }


def test_a_step_that_cannot_be_taken_ends_its_sequence_alone(small_grid: Bench) -> None:
    ids, other = prompt(40), prompt(64, seed=2)
    expected = small_grid.cold(ids)
    again = small_grid.cold(other, sequence_id=2)
    for name, bad in failing_steps(small_grid, other).items():
        begin = (small_grid.chunk(1, ids, range(32)), small_grid.chunk(2, other, range(32)))
        small_grid.run(Step(prefills=begin))
        mixed = replace(bad, prefills=(*bad.prefills, small_grid.chunk(1, ids, range(32, 40))))
        found = small_grid.model.run(mixed)
        assert set(found.failures) == {2}, name
        assert found.snapshot_xxh3 == (b"",) * len(bad.snapshots), name
        assert small_grid.decode(1, 40, found, STEPS) == expected, name
        after = small_grid.model.run(Step(decodes=(DecodeToken(2, 32, 5, GREEDY, 1),)))
        assert "found no live cache" in after.failures[2], f"{name}: its cache is gone"
        assert small_grid.cold(other, sequence_id=2) == again, f"{name}: it can begin again"


def test_a_prefix_with_one_plane_missing_is_refused(small_grid: Bench) -> None:
    ids = prompt(70)
    small_grid.cold(ids)
    restores = small_grid.restores(1, 64, small_grid.blocks)
    last = restores.pop()
    short = replace(last, planes=last.planes - 1)
    short = replace(short, payload=last.payload[: len(last.payload) // last.planes * short.planes])
    small_grid.run(Step(restores=(*restores, short)))
    found = small_grid.model.run(Step(prefills=(small_grid.chunk(1, ids, range(64, 70)),)))
    assert "found 48 tokens, expected 64" in found.failures[1]


def test_later_parts_of_a_step_skip_a_sequence_that_failed(small_grid: Bench) -> None:
    """One message for each sequence: the first, which is the cause."""
    token = DecodeToken(7, 3, 5, GREEDY, 1)
    (snapshot, *_) = small_grid.snapshots(7, range(32))
    found = small_grid.model.run(Step(decodes=(token, token), snapshots=(snapshot,)))
    assert found.failures == {7: "RowError: found no live cache, expected one with 3 tokens"}
    assert found.sampled == ()
    assert found.snapshot_xxh3 == (b"",)


def test_what_is_freed_is_gone_and_freeing_twice_is_no_fault(small_grid: Bench) -> None:
    ids = prompt(20)
    small_grid.run(Step(prefills=(small_grid.chunk(1, ids, range(20)),)))
    small_grid.run(Step(frees=(1, 1, 99)))
    found = small_grid.model.run(Step(decodes=(DecodeToken(1, 20, 5, GREEDY, 1),)))
    assert set(found.failures) == {1}


def test_a_step_before_the_weights_is_a_failure_and_no_crash(tiny: Path) -> None:
    identity, layout, _ = load_direct(tiny)
    empty = Bench(Model(identity, layout), layout)
    found = empty.model.run(Step(prefills=(empty.chunk(1, prompt(3), range(3)),)))
    assert "before the weights" in found.failures[1]
