"""The identity of a file: what changes K and V changes the guard, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf import GGUFReader
from millpond.codecs.descriptors import KvDType, LayerType, hash_chat_template
from millpond.codecs.fingerprint import NumericsIdentity, model_fingerprint
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import ConfigError, TokenizerError, UnsupportedModel
from millpond.runtime.families.config import ModelConfig
from millpond.runtime.families.config_gguf import model_config
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identify import identify
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.testing.gguf_writer import RawTensor, gguf_bytes
from millpond.runtime.vocabulary import read_vocabulary

NUMERICS = NumericsIdentity(
    device_kind="cpu",
    device_model="test",
    compute_dtype="float32",
    weight_form="dense",
    mlx_version="0",
    blas_name="",
    blas_version="",
    blas_threads=1,
    kernel_revision=1,
)
METADATA: dict[str, object] = {
    "general.architecture": "gemma3",
    "general.name": "tiny",
    "general.file_type": 0,
    "gemma3.context_length": 1024,
    "gemma3.embedding_length": 32,
    "gemma3.block_count": 3,
    "gemma3.feed_forward_length": 32,
    "gemma3.attention.head_count": 2,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 16,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 16,
    "gemma3.attention.sliding_window_pattern": 3,
    "gemma3.rope.freq_base": 1e6,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [b"<bos>", b"<eos>", b"a", b"b"],
    "tokenizer.ggml.scores": np.zeros(4, np.float32),
    "tokenizer.ggml.token_type": np.array([3, 3, 1, 1], np.int32),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}


def weights(config: ModelConfig) -> dict[str, np.ndarray]:
    shapes = expected_tensors(config, ())
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }


TENSORS = weights(model_config(METADATA, {"token_embd.weight": (8, 32)}))


def made(
    folder: Path,
    metadata: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    config: RuntimeConfig | None = None,
    numerics: NumericsIdentity = NUMERICS,
) -> ModelIdentity:
    path = folder / "stem of it.gguf"
    pairs = {
        key: value for key, value in (METADATA | (metadata or {})).items() if value is not None
    }
    path.write_bytes(gguf_bytes(pairs, TENSORS | (tensors or {})))
    with GgufFile.open(path) as file:
        return identify(file, config or RuntimeConfig(model=str(path)), numerics, {})


def test_the_identity_names_the_file(tmp_path: Path) -> None:
    identity = made(tmp_path)
    assert (identity.name, identity.repo, identity.quant) == ("tiny", "tiny", "F32")
    assert identity.namespace == "legacy"
    assert identity.fingerprint == model_fingerprint("tiny", "F32", "", "", "")
    descriptor = identity.descriptor
    assert descriptor.layer_types == (LayerType.SLIDING, LayerType.SLIDING, LayerType.FULL)
    assert (descriptor.nkv_heads, descriptor.head_dim) == ((1,) * 3, (16,) * 3)
    assert descriptor.kv_dtype is KvDType.F32
    template = hash_chat_template("{{ messages }}")
    assert descriptor.provenance.tokenizer_chat_template_hash == template
    assert made(tmp_path) == identity


@pytest.mark.parametrize(
    ("metadata", "repo", "expected"),
    [
        ({"general.name": None}, None, ("stem of it", "F32")),
        ({"general.name": "x", "general.file_type": 15}, None, ("x", "Q4_K_M")),
        ({"general.file_type": None}, "my/repo", ("my/repo", "")),
        ({"general.file_type": 999}, "", ("", "")),
        ({"general.name": 7, "general.file_type": "Q8_0"}, None, ("stem of it", "")),
    ],
)
def test_repo_and_quant_follow_their_rules(
    tmp_path: Path, metadata: dict[str, object], repo: str | None, expected: tuple[str, str]
) -> None:
    identity = made(tmp_path, metadata, config=RuntimeConfig(model="m", repo=repo))
    assert (identity.repo, identity.quant) == expected
    assert identity.fingerprint == model_fingerprint(*expected, "", "", "")


def test_both_hf2q_keys_make_a_strict_namespace_and_one_does_not(tmp_path: Path) -> None:
    both: dict[str, object] = {"hf2q.producer_version": "1.2", "hf2q.source_sha256": "AB" * 32}
    strict = made(tmp_path, both)
    assert strict.namespace == "strict"
    assert strict.fingerprint == model_fingerprint(
        "tiny", "F32", "1.2", "ab" * 32, hash_chat_template("{{ messages }}")
    )
    for key, value in both.items():
        assert made(tmp_path, {key: value}).namespace == "legacy"


def test_what_changes_k_and_v_changes_the_guard_and_not_the_legacy_fingerprint(
    tmp_path: Path,
) -> None:
    base = made(tmp_path)
    one_bit = TENSORS["token_embd.weight"].copy()
    one_bit.view(np.uint32)[0, 0] ^= 1
    metadata: list[dict[str, object]] = [
        {"gemma3.rope.freq_base": 1e5},
        {"gemma3.rope.freq_base_swa": 2e4},
        {"gemma3.rope.scaling.factor": 8.0},
        {"gemma3.attention.layer_norm_rms_epsilon": 1e-5},
        {"gemma3.attention.sliding_window": 17},
        {"gemma3.attention.sliding_window_pattern": np.array([True, False, True])},
    ]
    changed = [made(tmp_path, pairs) for pairs in metadata]
    changed += [made(tmp_path, tensors={"token_embd.weight": one_bit})]
    for field, value in (
        ("kv_dtype", "f16"),
        ("block_tokens", 128),
        ("prefill_chunk_tokens", 512),
    ):
        config = msgspec.structs.replace(RuntimeConfig(model="m"), **{field: value})
        changed.append(made(tmp_path, config=config))
    changed.append(made(tmp_path, numerics=msgspec.structs.replace(NUMERICS, blas_threads=2)))
    assert {identity.fingerprint for identity in changed} == {base.fingerprint}
    assert len({base.guard, *(identity.guard for identity in changed)}) == len(changed) + 1


def test_what_leaves_k_and_v_alone_leaves_the_guard_alone(tmp_path: Path) -> None:
    base = made(tmp_path)
    same: list[dict[str, object]] = [
        {"tokenizer.chat_template": "another"},
        {"general.name": "another", "general.file_type": 1},
        {"gemma3.final_logit_softcapping": 30.0},
        {"gemma3.context_length": 512},
        {"gemma3.rope.freq_base_swa": 1e4},
    ]
    for metadata in same:
        assert made(tmp_path, metadata).guard == base.guard
    smaller = RuntimeConfig(model="m", context_tokens=100, sliding_boundary_tokens=256)
    assert made(tmp_path, config=smaller).guard == base.guard


def test_the_context_is_cut_to_what_is_configured(tmp_path: Path) -> None:
    for configured, expected in ((None, 1024), (100, 100), (5000, 1024)):
        config = RuntimeConfig(model="m", context_tokens=configured)
        assert made(tmp_path, config=config).config.context_tokens == expected
    with pytest.raises(ConfigError, match="context_tokens: found 0"):
        made(tmp_path, config=RuntimeConfig(model="m", context_tokens=0))


def test_a_repo_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repo: found"):
        made(tmp_path, config=RuntimeConfig(model="m", repo="\udcff"))


def test_an_unsupported_tensor_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    raw = RawTensor((32, 32), "IQ4_NL", bytes(32 * 18))
    with pytest.raises(UnsupportedModel, match=r"'blk.1.ffn_up.weight': found type IQ4_NL, supp"):
        made(tmp_path, tensors={"blk.1.ffn_up.weight": raw})


def test_every_fixture_has_an_identity(shared_reference: Path) -> None:
    guards = set()
    paths = sorted((shared_reference / "fixtures").glob("*.gguf"))
    for path in paths:
        with GgufFile.open(path) as file:
            identity = identify(file, RuntimeConfig(model=str(path)), NUMERICS, {})
        guards.add(identity.guard)
        tokens = next(
            field for field in GGUFReader(path).fields.values() if field.name.endswith(".tokens")
        )
        assert [token.decode() for token in identity.vocabulary.tokens] == tokens.contents()
        assert identity.descriptor.num_layers == len(identity.config.layers)
    assert len(guards) == len(paths)


def test_a_vocabulary_is_read_with_its_defaults() -> None:
    spm = read_vocabulary(METADATA, 8)
    assert (spm.bos, spm.eos, spm.unk, spm.eot) == (0, 1, None, None)
    assert (spm.add_bos, spm.add_eos, spm.add_space_prefix) == (True, False, True)
    bpe = read_vocabulary(METADATA | {"tokenizer.ggml.model": "gpt2"}, 8)
    assert not bpe.add_bos and not bpe.add_space_prefix
    gemma4 = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False}
    assert read_vocabulary(METADATA | gemma4, 8).add_bos
    strange = METADATA | {"tokenizer.ggml.bos_token_id": 4, "tokenizer.ggml.eos_token_id": "1"}
    assert read_vocabulary(strange, 8).bos is None and read_vocabulary(strange, 8).eos is None
    bare = dataclasses.replace(spm, scores=(), types=(), chat_template="")
    keys = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.chat_template")
    assert read_vocabulary({k: v for k, v in METADATA.items() if k not in keys}, 8) == bare


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: found none"),
        ({"tokenizer.ggml.tokens": []}, "found 0 tokens, expected 1 to 8"),
        ({"tokenizer.ggml.tokens": ["x"] * 9}, "found 9 tokens, expected 1 to 8"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, "expected an array of strings"),
        ({"tokenizer.ggml.scores": np.zeros(3, np.float32)}, "expected 4 numbers"),
        ({"tokenizer.ggml.scores": np.full(4, np.nan, np.float32)}, "not finite"),
        ({"tokenizer.ggml.token_type": np.full(4, 7, np.int32)}, "found 7 to 7, expected 0 to 6"),
        ({"tokenizer.ggml.token_type": np.full(4, 1.0, np.float32)}, "expected 4 numbers"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "found 'yes', expected a bool"),
    ],
)
def test_a_broken_vocabulary_is_refused(
    tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        made(tmp_path, metadata)
