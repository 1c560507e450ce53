"""The runner over MLX, step by step: exactness (G1), many sequences, and requests that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from millpond.codecs.choices import SamplingParams
from millpond.runtime.errors import ModelUnreadable
from millpond.runtime.steps import PrefillChunk, Sampled, SnapshotPlanes
from model_bench import GREEDY, Bench, Blocks, prompt, token

LENGTHS = (255, 256, 257, 511, 512, 513, 700, 1024, 1025, 2000)
STEPS = 4


@pytest.fixture(scope="module")
def fixtures(shared_reference: Path) -> Path:
    return shared_reference / "fixtures"


@pytest.fixture(scope="module")
def loaded(fixtures: Path) -> Bench:
    return Bench.load(fixtures / "gemma3-tiny-f32.gguf")


@pytest.fixture
def bench(loaded: Bench) -> Bench:
    """The loaded model without any live cache."""
    loaded.good(frees=tuple(range(100)))
    return loaded


def digests(sampled: list[Sampled]) -> list[tuple[int, bytes]]:
    assert all(one.logits_xxh3 for one in sampled)
    return [(one.token_id, one.logits_xxh3) for one in sampled]


def whole_runs(cold: Bench, warm: Bench, length: int) -> tuple[list[Any], list[Any]]:
    ids = prompt(length, seed=length)
    first, blocks = cold.cold(ids)
    one = digests([first, *cold.decode(first, length, STEPS)])
    again = warm.warm(ids, blocks)
    return one, digests([again, *warm.decode(again, length, STEPS)])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
def test_restored_rows_change_no_bit_at_any_border(fixtures: Path, kv_dtype: str) -> None:
    """Two runners: what the second one knows of the prompt came through the blocks alone."""
    path = fixtures / "gemma3-tiny-f32.gguf"
    cold, warm = (Bench.load(path, kv_dtype=kv_dtype) for _ in range(2))
    for length in LENGTHS if kv_dtype == "f32" else LENGTHS[1:7]:
        one, two = whole_runs(cold, warm, length)
        assert one == two, f"{length} tokens"


@pytest.mark.parametrize(
    ("block", "chunk"), [(16, 16), (16, 32), (16, 64), (8, 16), (32, 64), (5, 15), (64, 64)]
)
@pytest.mark.parametrize("stem", ["gemma3-tiny-f32", "gemma4-ple-tiny-f32"])
def test_restored_rows_change_no_bit_around_the_window(
    fixtures: Path, stem: str, block: int, chunk: int
) -> None:
    """The window is 16: blocks and chunks smaller than it, larger, and no divisor of it."""
    grid = {"block_tokens": block, "prefill_chunk_tokens": chunk, "sliding_boundary_tokens": 0}
    bench = Bench.load(fixtures / f"{stem}.gguf", **grid)
    for length in (chunk + 1, 2 * chunk, 2 * chunk + 7, 70, 129):
        one, two = whole_runs(bench, bench, length)
        assert one == two, f"{length} tokens"


def test_blocks_of_a_warm_run_are_those_of_a_cold_one(bench: Bench) -> None:
    """A block that is spilled after a restore has the bytes that a cold run gives it."""
    ids = prompt(900)
    _, blocks = bench.cold(ids)
    for one in bench.restores(blocks, 256, sequence=2):
        bench.good(restores=(one,))
    for chunk in bench.chunks(ids, 256, sequence=2):
        wanted = bench.snapshots(chunk)
        bench.good(prefills=(chunk,), snapshots=tuple(wanted))
        for one in wanted:
            assert bytes(one.payload) == blocks[one.group, one.first_token // 256]


def test_room_for_a_longer_answer_changes_no_bit(bench: Bench) -> None:
    ids = prompt(600)
    found = []
    for room in (600, 601, 5000):
        for chunk in bench.chunks(ids):
            result = bench.good(prefills=(replace(chunk, context_tokens=room),))
        found.append(digests([*result.sampled, *bench.decode(result.sampled[0], 600, 20)]))
    assert found[0] == found[1] == found[2]


def test_sequences_side_by_side_get_what_they_get_alone(bench: Bench) -> None:
    prompts = {sequence: prompt(200 + 90 * sequence, seed=sequence) for sequence in (1, 2, 3)}
    alone = {}
    for sequence, ids in prompts.items():
        first, _ = bench.cold(ids)
        alone[sequence] = digests([first, *bench.decode(first, len(ids), STEPS)])
    chunks = {number: list(bench.chunks(ids, sequence=number)) for number, ids in prompts.items()}
    found: dict[int, list[Sampled]] = {number: [] for number in prompts}
    while any(chunks.values()) or any(len(found[number]) <= STEPS for number in found):
        due = [rest.pop(0) for rest in chunks.values() if rest]
        running = [number for number in found if found[number] and len(found[number]) <= STEPS]
        decodes = [
            token(
                found[number][-1],
                len(prompts[number]) + len(found[number]) - 1,
                len(found[number]),
                number,
            )
            for number in running
        ]
        result = bench.good(prefills=tuple(due), decodes=tuple(decodes))
        for one in result.sampled:
            found[one.sequence_id].append(one)
    assert {number: digests(all_) for number, all_ in found.items()} == alone


@pytest.mark.parametrize(
    "stem",
    ["gemma3-tiny-f32", "gemma4-dense-tiny-f32", "gemma4-ple-tiny-f32", "gemma4-moe-tiny-f32"],
)
def test_decoding_together_is_decoding_alone_up_to_rounding(fixtures: Path, stem: str) -> None:
    """Lengths around the window of 16: some rings wrapped, some not, all at other positions."""
    alone = Bench.load(fixtures / f"{stem}.gguf")
    together = alone.decoding_together(8)
    lengths = dict(enumerate((1, 5, 15, 16, 17, 40, 300), 1))
    shown = SamplingParams(logprobs=20)
    for number, length in lengths.items():
        for one in (alone, together):
            one.good(prefills=tuple(one.chunks(prompt(length, seed=number), sequence=number)))
    next_id = dict.fromkeys(lengths, 7)
    for step in range(1, 25):
        decodes = tuple(
            replace(
                token(Sampled(number, next_id[number]), length + step - 1, step, number),
                sample=shown,
            )
            for number, length in lengths.items()
        )
        one, two = alone.good(decodes=decodes).sampled, together.good(decodes=decodes).sampled
        for a, b in zip(one, two, strict=True):
            assert a.sequence_id == b.sequence_id
            assert a.logprob is not None and b.logprob is not None
            values = dict(b.logprob.top)
            for token_id, value in a.logprob.top[:10]:
                assert values[token_id] == pytest.approx(value, abs=1e-3)
            next_id[a.sequence_id] = a.token_id


def test_a_bad_token_in_a_batch_fails_its_sequence_alone(loaded: Bench) -> None:
    bench = loaded.decoding_together(4)
    for number in (1, 2, 3, 4):
        bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=number)))
    good = [token(Sampled(number, 5), 30, 1, number) for number in (1, 2, 3, 4)]
    result = bench.run(decodes=(good[0], replace(good[1], position=9), *good[2:]))
    assert list(result.failures) == [2]
    assert [one.sequence_id for one in result.sampled] == [1, 3, 4]


def test_two_tokens_of_a_sequence_in_one_batch_are_refused(loaded: Bench) -> None:
    bench = loaded.decoding_together(4)
    for number in (1, 2):
        bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=number)))
    one, two = (token(Sampled(number, 5), 30, 1, number) for number in (1, 2))
    result = bench.run(decodes=(one, two, one))
    assert list(result.failures) == [1]
    assert [found.sequence_id for found in result.sampled] == [2]


def test_a_draw_depends_on_seed_and_step_alone(bench: Bench) -> None:
    ids = prompt(40)
    hot = SamplingParams(temperature=1.5, seed=11, top_k=50, top_p=0.95)
    texts = []
    for sequence in (5, 6):
        (chunk,) = bench.chunks(ids, sequence=sequence)
        sampled = [*bench.good(prefills=(replace(chunk, sample=hot),)).sampled]
        for step in range(1, 12):
            one = replace(token(sampled[-1], 39 + step, step, sequence), sample=hot)
            sampled += bench.good(decodes=(one,)).sampled
        texts.append([one.token_id for one in sampled])
        bench.good(prefills=tuple(bench.chunks(prompt(33), sequence=99)))  # others draw, too
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3


# -- requests that are wrong


@pytest.fixture(scope="module")
def blocks(loaded: Bench) -> Blocks:
    return loaded.cold(prompt(600))[1]


def neighbour_lives(bench: Bench) -> None:
    """Another sequence's cache is untouched by whatever went wrong."""
    (one,) = bench.good(decodes=(replace(token(Sampled(7, 5), 30, 1, 7)),)).sampled
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=7)))
    (two,) = bench.good(decodes=(replace(token(Sampled(7, 5), 30, 1, 7)),)).sampled
    assert digests([one]) == digests([two])


BAD_PREFILLS: dict[str, dict[str, Any]] = {
    "a gap": {"first_token": 256},
    "no tokens": {"token_ids": b""},
    "half a token": {"token_ids": b"\0\0\0"},
    "an id outside the vocabulary": {"token_ids": (512).to_bytes(4, "little")},
    "the largest id": {"token_ids": b"\xff\xff\xff\xff"},
}


@pytest.mark.parametrize("case", BAD_PREFILLS)
def test_a_bad_chunk_fails_its_sequence_alone(bench: Bench, case: str) -> None:
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=7)))
    chunk = PrefillChunk(3, 0, b"\x02\0\0\0", GREEDY, 64)
    bad = replace(chunk, **BAD_PREFILLS[case])
    result = bench.run(prefills=(bad, replace(chunk, sequence_id=8)))
    assert list(result.failures) == [3]
    assert "found" in result.failures[3] or "buffer" in result.failures[3]
    assert [one.sequence_id for one in result.sampled] == [8]
    neighbour_lives(bench)


BAD_RESTORES: dict[str, dict[str, Any]] = {
    "a group that is none": {"group": 9},
    "a negative group": {"group": -1},
    "planes beyond the last": {"planes": 99},
    "no planes": {"planes": 0},
    "a negative plane": {"first_plane": -1},
    "a short payload": {"payload": memoryview(bytes(8))},
    "a gap": {"first_token": 256},
    "a negative position": {"first_token": -256},
    "no tokens": {"tokens": 0},
}


@pytest.mark.parametrize("case", BAD_RESTORES)
def test_a_bad_restore_fails_its_sequence_alone(bench: Bench, blocks: Blocks, case: str) -> None:
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=7)))
    group = bench.layout.full_groups[0]
    first = bench.restore(blocks, group, 0, (0, group.planes), sequence=3)
    if case == "a gap":
        first = replace(first, first_token=0)
        bench.good(restores=(replace(first, starts_over=True),))
        first = replace(first, first_token=512)
    bad = first if case == "a gap" else replace(first, **BAD_RESTORES[case])
    result = bench.run(restores=(bad,))
    assert list(result.failures) == [3]
    assert "found" in result.failures[3]
    neighbour_lives(bench)
    after = bench.run(decodes=(token(Sampled(3, 5), 0, 1, 3),))
    assert "no live cache" in after.failures[3]


def test_a_restore_that_starts_over_forgets_what_was_there(bench: Bench, blocks: Blocks) -> None:
    group = bench.layout.full_groups[0]
    one = bench.restore(blocks, group, 0, (0, group.planes), sequence=3)
    bench.good(restores=(one,))
    assert bench.run(restores=(one,)).failures
    bench.good(restores=(one,))
    bench.good(restores=(replace(one, starts_over=True),))


def test_half_restored_groups_are_not_a_prefix(bench: Bench, blocks: Blocks) -> None:
    """Full layers have 256 tokens, sliding ones none: prefill must refuse, not compute nonsense."""
    group = bench.layout.full_groups[0]
    bench.good(restores=(bench.restore(blocks, group, 0, (0, group.planes), sequence=3),))
    chunk = next(iter(bench.chunks(prompt(600), 256, sequence=3)))
    assert "expected 256" in bench.run(prefills=(chunk,)).failures[3]


def test_k_without_v_is_not_a_row(bench: Bench, blocks: Blocks) -> None:
    for group in bench.layout.groups:
        keys = (0, group.planes // 2)
        bench.good(restores=(bench.restore(blocks, group, 0, keys, sequence=3),))
    chunk = next(iter(bench.chunks(prompt(600), 256, sequence=3)))
    assert "found 0 tokens" in bench.run(prefills=(chunk,)).failures[3]


def test_a_window_with_rows_missing_is_refused(bench: Bench, blocks: Blocks) -> None:
    """The sliding rows begin 8 tokens before the boundary; the window reaches further back."""
    ids = prompt(600)
    for group in bench.layout.groups:
        one = bench.restore(blocks, group, 0, (0, group.planes), sequence=3)
        if not group.is_full:
            size = group.plane_bytes(8)
            one = replace(
                one, first_token=248, tokens=8, payload=memoryview(bytes(size * group.planes))
            )
        bench.good(restores=(one,))
    chunk = next(iter(bench.chunks(ids, 256, sequence=3)))
    assert "expected the last 15" in bench.run(prefills=(chunk,)).failures[3]


BAD_SNAPSHOTS: dict[str, dict[str, Any]] = {
    "rows that are not there yet": {"first_token": 256},
    "a group that is none": {"group": 2},
    "planes beyond the last": {"first_plane": 1},
    "a payload of another size": {"payload": memoryview(bytearray(16))},
    "another sequence": {"sequence_id": 1234},
}


@pytest.mark.parametrize("case", [*BAD_SNAPSHOTS, "a read-only payload"])
def test_a_bad_snapshot_fails_its_sequence_alone(bench: Bench, case: str) -> None:
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=7)))
    chunk = next(iter(bench.chunks(prompt(300), sequence=3)))
    good = bench.snapshots(chunk)[0]
    bad = replace(good, **BAD_SNAPSHOTS.get(case, {"payload": good.payload.toreadonly()}))
    result = bench.run(prefills=(chunk,), snapshots=(bad, good))
    assert list(result.failures) == [bad.sequence_id]
    assert result.snapshot_xxh3[0] == b""
    assert bool(result.snapshot_xxh3[1]) == (case == "another sequence")
    neighbour_lives(bench)


def test_a_window_keeps_its_chunk_until_the_next_one(bench: Bench) -> None:
    """Blocks of the last chunk can be taken in a later step; older ones are gone, and it says so."""
    chunks = list(bench.chunks(prompt(600), sequence=3))
    bench.good(prefills=(chunks[0],))
    first = [
        one for one in bench.snapshots(chunks[0]) if not bench.layout.groups[one.group].is_full
    ]
    assert bench.good(snapshots=tuple(first)).snapshot_xxh3[0]
    bench.good(prefills=(chunks[1],))
    assert "found rows 241 to 512" in bench.run(snapshots=tuple(first)).failures[3]


def test_a_decode_out_of_turn_fails_its_sequence_alone(bench: Bench) -> None:
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=3)))
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=7)))
    for position, token_id in ((31, 5), (29, 5), (30, 512), (30, -1)):
        bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=3)))
        result = bench.run(decodes=(token(Sampled(3, token_id), position, 1, 3),))
        assert list(result.failures) == [3]
    neighbour_lives(bench)


def test_a_freed_sequence_is_gone_and_freeing_twice_does_no_harm(bench: Bench) -> None:
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=3)))
    bench.good(frees=(3, 3, 77))
    assert bench.run(decodes=(token(Sampled(3, 5), 30, 1, 3),)).failures


def test_a_failed_sequence_may_start_afresh(bench: Bench) -> None:
    assert bench.run(decodes=(token(Sampled(3, 5), 30, 1, 3),)).failures
    bench.good(prefills=tuple(bench.chunks(prompt(30), sequence=3)))


def test_a_step_before_the_weights_fails_with_a_reason(loaded: Bench) -> None:
    fresh = Bench(type(loaded.model)(loaded.model._identity, loaded.layout), loaded.layout)
    result = fresh.run(prefills=tuple(fresh.chunks(prompt(3))))
    assert "before the weights" in result.failures[1]


def test_a_model_without_one_of_its_tensors_is_refused(loaded: Bench) -> None:
    fresh = type(loaded.model)(loaded.model._identity, loaded.layout)
    with pytest.raises(ModelUnreadable, match=r"found none, expected"):
        fresh.finish_load()


def test_digests_are_those_of_the_bytes(bench: Bench) -> None:
    xxhash = pytest.importorskip("xxhash", reason="the runtime needs it")
    chunk = next(iter(bench.chunks(prompt(300), sequence=3)))
    wanted: list[SnapshotPlanes] = bench.snapshots(chunk)
    result = bench.good(prefills=(chunk,), snapshots=tuple(wanted))
    for one, digest in zip(wanted, result.snapshot_xxh3, strict=True):
        assert digest == xxhash.xxh3_128_digest(one.payload)
