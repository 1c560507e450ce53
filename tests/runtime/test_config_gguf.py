"""Metadata becomes a configuration with every default and quirk, or a clear refusal."""

from __future__ import annotations

import lzma
import math
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from millpond.codecs.descriptors import LayerType
from millpond.codecs.gguf import parse_header
from millpond.runtime.errors import ModelUnreadable, UnsupportedModel
from millpond.runtime.families.config_gguf import model_config
from millpond.runtime.families.tensors import check_tensors, expected_tensors
from millpond.runtime.vocabulary import read_vocabulary

S, F = LayerType.SLIDING, LayerType.FULL
EPS = struct.unpack("<f", struct.pack("<f", 1e-6))[0]


def gemma3(**changes: object) -> dict[str, object]:
    return _merged(
        "gemma3",
        {
            "context_length": 1024,
            "embedding_length": 64,
            "block_count": 12,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.layer_norm_rms_epsilon": EPS,
            "attention.sliding_window": 16,
            "rope.freq_base": 1e6,
        },
        changes,
    )


def gemma4(**changes: object) -> dict[str, object]:
    return _merged(
        "gemma4",
        {
            "context_length": 1024,
            "embedding_length": 64,
            "block_count": 4,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": np.array([2, 1, 2, 1], np.int32),
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "attention.layer_norm_rms_epsilon": EPS,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": np.array([True, False, True, False]),
            "rope.freq_base": 1e6,
            "rope.dimension_count": 64,
            "embedding_length_per_layer_input": 0,
        },
        changes,
    )


def llama(**changes: object) -> dict[str, object]:
    return _merged(
        "llama",
        {
            "context_length": 2048,
            "embedding_length": 96,
            "block_count": 2,
            "feed_forward_length": 128,
            "attention.head_count": 6,
            "attention.head_count_kv": 3,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        changes,
    )


def _merged(family: str, base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """``rope__freq_base=None`` takes a key out; two underscores stand for a dot."""
    base |= {key.replace("__", "."): value for key, value in changes.items()}
    pairs = {f"{family}.{key}": value for key, value in base.items() if value is not None}
    return {"general.architecture": family, **pairs}


SHAPES = {"token_embd.weight": (512, 64), "rope_freqs.weight": (32,)}


def test_gemma_3_without_its_optional_keys_has_the_built_in_defaults() -> None:
    config = model_config(gemma3(), SHAPES)
    assert config.layer_types == (S, S, S, S, S, F) * 2
    sliding, full = config.layers[0], config.layers[5]
    assert (sliding.rope_base, full.rope_base) == (10_000.0, 1e6)
    assert sliding.rope_dims == full.rope_dims == 32
    assert config.attention_scale == 32**-0.5
    assert config.embedding_scale == 8.0
    assert config.logit_softcap == 0.0 and not full.use_rope_freqs
    assert (config.vocab, config.norm_eps, config.sliding_window) == (512, EPS, 16)
    assert config.kv_source == () and not config.interleaved_rope


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_3_without_a_window_has_full_layers_only(window: int | None) -> None:
    config = model_config(gemma3(attention__sliding_window=window), SHAPES)
    assert set(config.layer_types) == {F} and config.sliding_window == 0
    assert {layer.rope_base for layer in config.layers} == {1e6}


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (3, (S, S, F) * 4),
        (1, (F,) * 12),
        (0, (S,) * 12),
        (np.array([True, False] * 6), (S, F) * 6),
        (np.array([1, 0] * 6, np.int32), (S, F) * 6),
    ],
)
def test_the_sliding_pattern_is_a_number_or_an_array(
    pattern: object, kinds: tuple[LayerType, ...]
) -> None:
    metadata = gemma3(attention__sliding_window_pattern=pattern)
    assert model_config(metadata, SHAPES).layer_types == kinds


def test_the_attention_scale_of_62_layers_is_that_of_the_27b() -> None:
    assert model_config(gemma3(block_count=62), SHAPES).attention_scale == 16**-0.5
    assert model_config(gemma3(block_count=61), SHAPES).attention_scale == 32**-0.5


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
        {"rope__scaling__factor": 8.0},
        {"rope__scale_linear": 8.0},
    ],
)
def test_linear_scaling_touches_full_layers_only(scaling: dict[str, object]) -> None:
    config = model_config(gemma3(**scaling), SHAPES)
    assert {layer.rope_scale for layer in config.layers if layer.kind is S} == {1.0}
    assert {layer.rope_scale for layer in config.layers if layer.kind is F} == {0.125}


def test_scaling_of_type_none_or_factor_zero_is_off() -> None:
    for scaling in (
        {"rope__scaling__type": "none", "rope__scaling__factor": 8.0},
        {"rope__scaling__factor": 0.0},
    ):
        assert {layer.rope_scale for layer in model_config(gemma3(**scaling), SHAPES).layers} == {1}


def test_gemma_4_layers_differ_by_kind() -> None:
    config = model_config(gemma4(), SHAPES)
    sliding, full = config.layers[0], config.layers[1]
    assert (sliding.kv_heads, sliding.head_dim, sliding.rope_base) == (2, 32, 10_000.0)
    assert (full.kv_heads, full.head_dim, full.rope_base) == (1, 64, 1e6)
    # rope.dimension_count is that of the full layers; the sliding default is their own head size.
    assert (sliding.rope_dims, full.rope_dims) == (32, 64)
    assert (sliding.use_rope_freqs, full.use_rope_freqs) == (False, True)
    assert config.attention_scale == 1.0 and config.logit_softcap == 30.0
    assert (config.head_dim, config.global_head_dim) == (32, 64)
    assert (config.num_key_value_heads, config.num_global_key_value_heads) == (2, 1)
    assert model_config(gemma4(final_logit_softcapping=0.0), SHAPES).logit_softcap == 0.0


def test_shared_layers_read_the_last_owner_of_their_kind() -> None:
    pattern = np.array([True, True, True, False, True, True, True, False])
    config = model_config(
        gemma4(
            block_count=8,
            attention__head_count_kv=1,
            attention__sliding_window_pattern=pattern,
            attention__shared_kv_layers=4,
            feed_forward_length=np.array([64] * 4 + [128] * 4, np.int32),
            embedding_length_per_layer_input=16,
        ),
        SHAPES,
    )
    assert config.kv_source == (0, 1, 2, 3, 2, 2, 2, 3)
    assert [layer.feed_forward for layer in config.layers] == [64] * 4 + [128] * 4
    names = expected_tensors(config, SHAPES)
    assert names["per_layer_token_embd.weight"] == (512, 128)
    assert "blk.3.attn_k.weight" in names and "blk.4.attn_k.weight" not in names
    assert "blk.4.attn_q_norm.weight" in names and "blk.4.attn_k_norm.weight" not in names
    assert names["blk.4.ffn_down.weight"] == (64, 128)


def test_sharing_without_an_owner_of_the_kind_is_refused() -> None:
    with pytest.raises(ModelUnreadable, match=r"shared_kv_layers: found 3, expected a full layer"):
        model_config(gemma4(attention__shared_kv_layers=3), SHAPES)


def test_experts_may_be_fused_or_split() -> None:
    changes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 16}
    config = model_config(gemma4(**changes), SHAPES)
    assert (config.experts, config.experts_used, config.expert_feed_forward) == (8, 2, 16)
    split = expected_tensors(config, SHAPES)
    assert split["blk.0.ffn_gate_exps.weight"] == split["blk.0.ffn_up_exps.weight"] == (8, 16, 64)
    fused = expected_tensors(config, [*SHAPES, "blk.0.ffn_gate_up_exps.weight"])
    assert fused["blk.0.ffn_gate_up_exps.weight"] == (8, 32, 64)
    assert "blk.0.ffn_gate_exps.weight" not in fused and "blk.1.ffn_gate_exps.weight" in fused
    with pytest.raises(ModelUnreadable, match=r"expert_used_count: found 9, expected .* 1 to 8"):
        model_config(gemma4(**changes | {"expert_used_count": 9}), SHAPES)


def test_a_gemma_4_layer_may_lack_its_v_projection_and_no_other_may() -> None:
    config = model_config(gemma4(), SHAPES)
    names = expected_tensors(config, [*SHAPES, "blk.0.attn_v.weight"])
    assert names["blk.0.attn_v.weight"] == (64, 64) and "blk.1.attn_v.weight" not in names
    assert "blk.0.attn_v.weight" in expected_tensors(model_config(gemma3(), SHAPES), SHAPES)


def test_llama_rotates_neighbours_and_takes_defaults_from_its_widths() -> None:
    shapes = {"token_embd.weight": (100, 96)}
    config = model_config(llama(), shapes)
    layer = config.layers[0]
    assert config.interleaved_rope and config.embedding_scale == 1.0
    assert (layer.head_dim, layer.rope_dims, layer.kv_heads) == (16, 16, 3)
    assert layer.rope_base == 10_000.0 and not layer.use_rope_freqs
    assert math.isclose(config.attention_scale, 0.25)
    assert set(config.layer_types) == {F}
    names = expected_tensors(config, shapes)
    assert "blk.0.attn_q_norm.weight" not in names and "output.weight" not in names
    scaled = model_config(llama(), shapes | {"rope_freqs.weight": (8,)})
    assert scaled.layers[0].use_rope_freqs
    assert expected_tensors(scaled, shapes)["rope_freqs.weight"] == (8,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "gemma3.block_count: found no such key"),
        ({"block_count": 0}, "gemma3.block_count: found 0, expected an integer from 1 to 1024"),
        ({"block_count": 1025}, "found 1025, expected"),
        ({"block_count": 2**63}, "gemma3.block_count: found 9223372036854775808"),
        ({"block_count": True}, "gemma3.block_count: found True"),
        ({"block_count": "12"}, "gemma3.block_count: found '12'"),
        ({"embedding_length": 2**40}, "gemma3.embedding_length"),
        ({"attention__head_count": 5000}, "attention.head_count: found 5000"),
        ({"attention__head_count_kv": 3}, "found 3 KV heads, expected a divisor of 4"),
        ({"attention__head_count_kv": np.array([1, 1], np.int32)}, "for each of 12 layers"),
        ({"attention__head_count_kv": np.array([1.5] * 12)}, "found 1.5, expected an integer"),
        ({"attention__key_length": 2**20}, "attention.key_length"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: found no such key"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "found nan, expected a number"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "found 0.0, expected a number"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "found -1.0"),
        ({"rope__freq_base": float("inf")}, "rope.freq_base: found inf"),
        ({"rope__freq_base": 2**64}, "rope.freq_base: found"),
        ({"rope__dimension_count": 33}, "found 33 rotated elements"),
        ({"rope__dimension_count": 64}, "found 64 rotated elements, expected an even number up to"),
        ({"attention__sliding_window_pattern": np.array([True])}, "one bool for each of 12"),
        ({"attention__sliding_window_pattern": np.array([2] * 12, np.int32)}, "one bool for each"),
        ({"attention__sliding_window_pattern": "x"}, "sliding_window_pattern: found 'x'"),
        ({"rope__scaling__type": 3}, "rope.scaling.type: found 3, expected a string"),
        ({"context_length": 0}, "context_length: found 0"),
    ],
)
def test_a_senseless_value_is_refused_with_key_found_and_expected(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        model_config(gemma3(**changes), SHAPES)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "qwen3"}, "found 'qwen3', supported are gemma3, gemma4, llama"),
        (gemma3(attention__value_length=16), "value_length: found 16, supported is 32"),
        (gemma3(rope__scaling__type="yarn"), "rope.scaling.type: found 'yarn'"),
        (gemma3(attention__head_count=np.array([4] * 11 + [2], np.int32)), "one number for all"),
        (
            gemma4(attention__head_count_kv=np.array([2, 1, 1, 1], np.int32)),
            "layer 2: found KV heads and head size .1, 32., supported is .2, 32.",
        ),
        (llama(expert_count=8), "llama.expert_count: found experts"),
    ],
)
def test_what_is_not_served_is_refused_by_name(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        model_config(metadata, {"token_embd.weight": (100, 64)})


def test_a_file_without_architecture_or_embedding_is_unreadable() -> None:
    with pytest.raises(ModelUnreadable, match=r"general.architecture: found None"):
        model_config({}, {})
    for shapes in ({}, {"token_embd.weight": (3,)}):
        with pytest.raises(ModelUnreadable, match=r"token_embd.weight"):
            model_config(gemma3(), shapes)


def test_tensors_are_checked_by_name_and_shape() -> None:
    config = model_config(gemma3(), SHAPES)
    whole = expected_tensors(config, SHAPES)
    assert check_tensors(config, whole) == whole
    assert check_tensors(config, whole | {"rope_freqs.weight": (3,)}) == whole
    missing = {name: shape for name, shape in whole.items() if name != "blk.3.attn_q.weight"}
    with pytest.raises(
        ModelUnreadable, match=r"'blk.3.attn_q.weight': found none, expected shape .128,"
    ):
        check_tensors(config, missing)
    with pytest.raises(ModelUnreadable, match=r"'output_norm.weight': found shape .1,., expected"):
        check_tensors(config, whole | {"output_norm.weight": (1,)})
    for extra in ("blk.0.attn_q.bias", "blk.0.attn_qkv.weight", "blk.99.attn_q.weight", "v.patch"):
        with pytest.raises(UnsupportedModel, match=extra):
            check_tensors(config, whole | {extra: (1,)})


def test_unused_k_and_v_of_sharing_layers_are_ignored_and_others_are_not() -> None:
    config = model_config(gemma4(attention__shared_kv_layers=2), SHAPES)
    present = [*SHAPES, "blk.0.attn_v.weight", "blk.1.attn_v.weight"]
    whole = expected_tensors(config, present)
    unused = {f"blk.3.{name}.weight": (1,) for name in ("attn_k", "attn_v", "attn_k_norm")}
    assert check_tensors(config, whole | unused) == whole
    with pytest.raises(UnsupportedModel, match=r"blk.3.attn_q.bias"):
        check_tensors(config, whole | {"blk.3.attn_q.bias": (1,)})


def test_gemma_4_cannot_do_without_its_rope_frequencies() -> None:
    config = model_config(gemma4(), {"token_embd.weight": (512, 64)})
    whole = expected_tensors(config, ())
    bare = {name: shape for name, shape in whole.items() if name != "rope_freqs.weight"}
    with pytest.raises(ModelUnreadable, match=r"'rope_freqs.weight': found none"):
        check_tensors(config, bare)


def test_the_header_of_the_real_26b_a4b_is_understood(shared_reference: Path) -> None:
    packed = shared_reference / "fixtures" / "ggml-vocab-gemma-4.gguf.xz"
    data = lzma.decompress(packed.read_bytes())
    metadata = parse_header(data, len(data)).metadata
    shapes = {"token_embd.weight": (262144, 2816), "rope_freqs.weight": (256,)}
    config = model_config(metadata, shapes)
    assert config.layer_types == (S, S, S, S, S, F) * 5
    assert (config.num_key_value_heads, config.head_dim) == (8, 256)
    assert (config.num_global_key_value_heads, config.global_head_dim) == (2, 512)
    assert (config.experts, config.experts_used, config.expert_feed_forward) == (128, 8, 704)
    assert (config.heads, config.hidden, config.sliding_window) == (16, 2816, 1024)
    assert config.logit_softcap == 30.0 and config.context_tokens == 262144
    names = expected_tensors(config, ["blk.0.ffn_gate_up_exps.weight"])
    assert names["blk.0.ffn_gate_up_exps.weight"] == (128, 1408, 2816)
    assert names["rope_freqs.weight"] == (256,)
    vocabulary = read_vocabulary(metadata, config.vocab)
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (262144, 514906)
    assert (vocabulary.bos, vocabulary.add_bos) == (2, True)


@pytest.mark.parametrize(
    "key",
    [
        "gemma4.attention.head_count",
        "gemma4.attention.head_count_kv",
        "gemma4.feed_forward_length",
        "gemma4.attention.sliding_window_pattern",
        "gemma4.block_count",
        "gemma4.rope.freq_base",
        "gemma4.rope.scaling.type",
        "general.architecture",
        "tokenizer.ggml.suppress_tokens",
    ],
)
def test_a_huge_value_is_refused_in_one_short_line_and_never_unfolded(key: str) -> None:
    huge = [np.ones(10**7, np.uint8), [b"x"] * 10**6, "x" * 10**6]
    for value in huge:
        tracemalloc.start()
        with pytest.raises((ModelUnreadable, UnsupportedModel)) as refusal:
            model_config(gemma4() | {key: value}, SHAPES)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)
        assert peak < 10**6
