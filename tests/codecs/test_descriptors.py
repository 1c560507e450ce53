"""The seed's own checks on descriptor, provenance and KV dtype."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field

import msgspec
import pytest
from millpond.codecs.descriptors import (
    KvDType,
    KvSpillDescriptor,
    KvSpillProvenance,
    LayerType,
    hash_chat_template,
)
from millpond.codecs.errors import DescriptorError
from millpond.runtime.kv.layout import KvLayout

S, F = LayerType.SLIDING, LayerType.FULL


@dataclass
class Weights:
    sliding_window: int = 1024
    layer_types: list[LayerType] = field(default_factory=lambda: [S, S, F])
    num_key_value_heads: int = 16
    head_dim: int = 256
    num_global_key_value_heads: int = 4
    global_head_dim: int = 512
    kv_source: list[int] = field(default_factory=list)


def descriptor(dtype: KvDType = KvDType.F32) -> KvSpillDescriptor:
    provenance = KvSpillProvenance("0.3.1", "ab" * 32, hash_chat_template("{{ x }}"))
    return KvSpillDescriptor.from_gemma_loaded_model(Weights(), 512, dtype, provenance)


def layout(value: KvSpillDescriptor) -> KvLayout:
    return KvLayout.from_descriptor(value, 256, 256, 1024)


def test_bytes_per_element_are_four_and_two() -> None:
    assert [dtype.elem_bytes for dtype in KvDType] == [4, 2, 2]
    assert KvDType.F32 is not KvDType.F16


@pytest.mark.parametrize("dtype", list(KvDType))
def test_a_dtype_survives_the_way_to_mlx_and_back(dtype: KvDType) -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    assert KvDType.from_mlx_dtype(dtype.to_mlx_dtype()) is dtype


def test_any_other_mlx_dtype_is_refused_with_found_and_expected() -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    for other in (mx.int8, mx.uint32, mx.float64, mx.complex64, mx.bool_):
        with pytest.raises(DescriptorError, match=r"found '\w+', expected one of float32"):
            KvDType.from_mlx_dtype(other)


def test_layers_carry_the_shape_of_their_kind() -> None:
    found = descriptor()
    assert found.num_layers == 3
    assert found.layer_types == (S, S, F)
    assert found.nkv_heads == (16, 16, 4)
    assert found.head_dim == (256, 256, 512)
    assert found.sliding_window == 1024
    assert found.max_decode_tokens == 512


def test_capturing_reads_the_weights_and_never_changes_them() -> None:
    weights = Weights()
    before = copy.deepcopy(weights)
    captured = KvSpillDescriptor.from_gemma_loaded_model(weights)
    assert weights == before
    weights.layer_types[0] = F
    weights.head_dim = 1
    assert captured.layer_types == (S, S, F)
    assert captured.head_dim == (256, 256, 512)


def test_a_copy_and_an_encoding_keep_every_field() -> None:
    value = descriptor(KvDType.BF16)
    assert copy.copy(value) == value
    assert copy.deepcopy(value) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=KvSpillDescriptor) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=KvSpillDescriptor) == value


def test_a_descriptor_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        descriptor().num_layers = 4  # type: ignore[misc]


def test_lengths_are_the_consumers_job() -> None:
    odd = msgspec.structs.replace(descriptor(), nkv_heads=(1,))
    with pytest.raises(DescriptorError, match="nkv_heads: found 1 entries, expected 3"):
        layout(odd)


def test_f16_halves_the_bytes_exactly() -> None:
    wide, narrow = layout(descriptor()), layout(descriptor(KvDType.F16))
    for one, other in zip(wide.groups, narrow.groups, strict=True):
        assert one.block_bytes(256) == 2 * other.block_bytes(256)


def test_layers_that_share_keys_and_values_store_nothing() -> None:
    weights = Weights(layer_types=[S, F, S, F], kv_source=[0, 1, 0, 1])
    shared = KvSpillDescriptor.from_gemma_loaded_model(weights)
    assert shared.kv_source == (0, 1, 0, 1)
    assert [group.layers for group in layout(shared).groups] == [(0,), (1,)]


def test_a_template_hash_is_hex_sha256_and_empty_for_none() -> None:
    assert hash_chat_template("") == ""
    assert hash_chat_template("é") == hashlib.sha256("é".encode()).hexdigest()


def test_provenance_looks_at_producer_and_source_only() -> None:
    assert not KvSpillProvenance().is_hf2q
    assert not KvSpillProvenance(tokenizer_chat_template_hash="ab").is_hf2q
    assert KvSpillProvenance(producer_version="1").is_hf2q
    assert KvSpillProvenance(source_sha256="ab").is_hf2q


def test_both_hf2q_keys_make_a_file_strict_and_any_other_shape_external() -> None:
    both = {"hf2q.producer_version": "0.3", "hf2q.source_sha256": "ABCD", "hf2q.mmproj_sha256": ""}
    assert KvSpillProvenance.from_metadata(both) == KvSpillProvenance("0.3", "abcd")
    for odd in (
        {},
        {"hf2q.producer_version": "0.3"},
        {"hf2q.source_sha256": "ab"},
        {"hf2q.producer_version": "", "hf2q.source_sha256": "ab"},
        {"hf2q.producer_version": "0.3", "hf2q.source_sha256": ""},
        {"hf2q.producer_version": 3, "hf2q.source_sha256": "ab"},
        {"hf2q.producer_version": "0.3", "hf2q.source_sha256": ["ab"]},
    ):
        found = KvSpillProvenance.from_metadata({**odd, "tokenizer.chat_template": "t"})
        assert found == KvSpillProvenance("", "", hash_chat_template("t"))
