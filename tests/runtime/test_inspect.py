"""The report of a file: everything its header tells, and why it cannot be served if so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGUFReader
from millpond.codecs.fingerprint import NumericsIdentity
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import ConfigError, ModelNotFound, ModelUnreadable
from millpond.runtime.inspect import inspect_report
from millpond.runtime.testing.gguf_writer import RawTensor, gguf_bytes

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


def report(path: Path, **fields: Any) -> dict[str, Any]:
    found = inspect_report(path, RuntimeConfig(model=str(path), **fields), NUMERICS, {})
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_gemma_4_file_is_shown_layer_by_layer(shared_reference: Path) -> None:
    path = shared_reference / "fixtures" / "gemma4-dense-k256-mixed.gguf"
    found = report(path)
    assert found["problem"] == ""
    assert found["descriptor"]["nkv_heads"] == [4, 4, 2]
    assert found["descriptor"]["head_dim"] == [32, 32, 64]
    assert found["descriptor"]["layer_types"] == ["sliding", "sliding", "full"]
    assert [layer["head_dim"] for layer in found["layers"]] == [32, 32, 64]
    assert found["namespace"] == "legacy" and len(found["fingerprint"]) == 64
    counts: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
    assert {entry["type"]: entry["tensors"] for entry in found["tensor_types"]} == counts
    fates = {entry["type"]: entry["repacked"] for entry in found["tensor_types"]}
    assert fates["Q5_K"] == "repacked losslessly" and fates["Q6_K"] == "dequantised"
    assert found["memory"]["dense_bytes"] == 4 * found["weights"]
    assert found["memory"]["repacked_bytes"] < found["memory"]["dense_bytes"]


def test_kv_bytes_per_token_count_k_and_v_of_every_layer_that_owns_them(
    shared_reference: Path,
) -> None:
    found = report(shared_reference / "fixtures" / "gemma4-ple-tiny-q8_0.gguf", kv_dtype="f16")
    assert found["descriptor"]["kv_source"] == [0, 1, 2, 3, 2, 2, 2, 3]
    kv = found["kv"]
    assert kv["full_bytes_per_token"] == 2 * 64 * 2
    assert kv["sliding_bytes_per_token"] == 3 * 2 * 32 * 2
    assert kv["sliding_bytes_max"] == 16 * kv["sliding_bytes_per_token"]
    assert [group["layers"] for group in kv["groups"]] == [[0, 1, 2], [3]]
    assert sum(entry["unused"] for entry in found["tensor_types"]) == 12


def test_hf2q_keys_make_the_namespace_strict(shared_reference: Path, tmp_path: Path) -> None:
    keys = {"hf2q.producer_version": "1", "hf2q.source_sha256": "ab"}
    for pairs, namespace in ((keys, "strict"), ({"hf2q.producer_version": "1"}, "legacy")):
        path = tmp_path / "x.gguf"
        path.write_bytes(gguf_bytes({"general.architecture": "gemma4", **pairs}, {}))
        assert report(path)["namespace"] == namespace


@pytest.mark.parametrize(
    ("metadata", "tensors", "problem"),
    [
        ({"general.architecture": "mamba"}, {}, "found 'mamba', supported are gemma3, gemma4"),
        ({}, {"x": RawTensor((2, 32), "IQ4_NL", bytes(36))}, "general.architecture: found None"),
        ({"general.architecture": "gemma3"}, {"a": np.ones(3)}, "gemma3.block_count: found no"),
    ],
)
def test_a_file_that_cannot_be_served_says_why(
    tmp_path: Path, metadata: dict[str, object], tensors: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    found = report(path)
    assert problem in found["problem"]
    assert found["descriptor"] is found["kv"] is found["memory"] is None
    assert len(found["tensor_types"]) == len(tensors)


def test_a_grid_that_does_not_fit_is_the_problem_and_the_rest_is_shown(
    shared_reference: Path,
) -> None:
    path = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    found = report(path, block_tokens=256, prefill_chunk_tokens=300)
    assert "found 300, expected a multiple of 256" in found["problem"]
    assert found["kv"] is None and found["vocabulary"]["tokens"] == 512


def test_a_vocabulary_that_no_tokeniser_reads_is_the_problem(
    shared_reference: Path, tmp_path: Path
) -> None:
    """Only its arrays were looked at once: the file was called fit, and then could not be loaded."""
    whole = (shared_reference / "fixtures" / "gemma4-dense-tiny-f32.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    name = b"tokenizer.ggml.model" + (8).to_bytes(4, "little") + (6).to_bytes(8, "little")
    path.write_bytes(whole.replace(name + b"gemma4", name + b"gemma9"))
    assert "tokenizer.ggml.model: found 'gemma9'" in report(path)["problem"]


def test_a_cpu_without_the_fast_blas_is_told_of(shared_reference: Path) -> None:
    path = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    slow = msgspec.structs.replace(NUMERICS, blas_name="bundled")
    config = RuntimeConfig(model=str(path))
    told = inspect_report(path, config, slow, {})["compute_problem"]
    assert ("fast-cpu" in told) is (sys.platform == "linux")
    assert report(path)["compute_problem"] == ""


def test_what_is_no_gguf_raises(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"no")
    with pytest.raises(ModelUnreadable):
        report(tmp_path / "bad")
    with pytest.raises(ModelNotFound):
        report(tmp_path / "none")


def test_a_configuration_that_cannot_be_served_raises(shared_reference: Path) -> None:
    path = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    with pytest.raises(ConfigError, match="kv_dtype: found 'q8'"):
        report(path, kv_dtype="q8")
