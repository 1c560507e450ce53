"""Which blocks exist, and which of them a restore needs."""

from __future__ import annotations

import pytest
from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, KvSpillProvenance, LayerType
from millpond.codecs.errors import DescriptorError
from millpond.runtime.kv.layout import KvLayout

S, F = LayerType.SLIDING, LayerType.FULL


def layout(
    types: tuple[LayerType, ...] = (S, S, F),
    window: int = 512,
    chunk: int = 256,
    stride: int = 1024,
) -> KvLayout:
    count = len(types)
    descriptor = KvSpillDescriptor(
        window, 512, count, types, (1,) * count, (256,) * count, KvDType.F32, KvSpillProvenance()
    )
    return KvLayout.from_descriptor(descriptor, 256, chunk, stride)


def test_group_names_tell_kind_and_shape() -> None:
    names = [group.name for group in layout().groups]
    assert names == ["g0-sliding-h1-d256-f32", "g1-full-h1-d256-f32"]


def test_full_groups_need_every_block_and_sliding_ones_the_last_window() -> None:
    found = layout()
    sliding, full = found.groups
    assert found.blocks_for(full, 2048) == range(8)
    assert found.blocks_for(sliding, 2048) == range(6, 8)
    assert found.blocks_for(sliding, 256) == range(1)
    assert layout(window=16).blocks_for(sliding, 2048) == range(7, 8)
    assert layout(window=513).blocks_for(sliding, 2048) == range(5, 8)
    assert layout(window=10_000).blocks_for(sliding, 2048) == range(8)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0), (256, 0), (257, 256), (512, 256), (513, 512), (2049, 2048)]
)
def test_a_hit_is_whole_chunks_and_leaves_at_least_one_token(tokens: int, expected: int) -> None:
    assert layout().reuse_limit(tokens) == expected


def test_kept_boundaries_are_where_a_restore_may_end() -> None:
    assert layout().kept_boundaries(2049) == (1024, 2048)
    assert layout().kept_boundaries(2048) == (1024, 1792, 2048)
    assert layout().kept_boundaries(700) == (512,)
    assert layout().kept_boundaries(255) == ()
    assert layout().kept_boundaries(2049, branch=768) == (768, 1024, 2048)
    assert layout(stride=0).kept_boundaries(1000) == (256, 512, 768)


def test_the_minimum_counts_full_rows_times_prefix_and_sliding_rows_times_window() -> None:
    row = 2 * 256 * 4
    assert layout().minimum_bytes(2048) == row * (2048 + 2 * 512)


def test_parts_cover_every_plane_once_and_fit_the_slot() -> None:
    group = layout((S,) * 5).groups[0]
    plane = group.plane_bytes(256)
    assert group.parts(256, 3 * plane) == ((0, 3), (3, 3), (6, 3), (9, 1))
    assert group.parts(256, 100 * plane) == ((0, 10),)
    with pytest.raises(DescriptorError, match="at least one plane"):
        group.parts(256, plane - 1)


def test_a_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DescriptorError, match="prefill_chunk_tokens"):
        layout(chunk=300)
    with pytest.raises(DescriptorError, match="sliding_boundary_tokens"):
        layout(stride=300)


def test_the_longest_sequence_that_fits_is_found_to_the_token() -> None:
    found = layout()
    for tokens in (1, 255, 256, 700, 768, 769, 4096):
        budget = found.live_bytes(tokens)
        assert found.tokens_within(budget, 10_000) == tokens
        assert found.tokens_within(budget - 1, 10_000) == tokens - 1
        assert found.tokens_within(budget, 100) == min(tokens, 100)
    assert found.tokens_within(0, 10_000) == 0


def test_a_held_cache_never_takes_more_than_the_running_one_did() -> None:
    for found in (layout(), layout((F,)), layout((S,)), layout(window=10_000)):
        for tokens in (256, 512, 4096):
            assert found.held_bytes(tokens) <= found.live_bytes(tokens)
