"""Every family fixture: its descriptor against the recorded configuration, and its namespace."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, KvSpillProvenance, LayerType
from millpond.codecs.fingerprint import model_fingerprint
from millpond.runtime.cli import main
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identify import read_config
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.testing.gguf_writer import string_bytes, value_bytes

Capture = pytest.CaptureFixture[str]
KINDS = {"sliding_attention": LayerType.SLIDING, "full_attention": LayerType.FULL}
NAMES = [
    *(f"gemma3-tiny-{kind}" for kind in ("f32", "f16", "q8_0", "q4_0")),
    "gemma3-27b-tiny-q8_0",
    *(
        f"gemma4-{style}-tiny-{kind}"
        for style in ("dense", "ple", "moe")
        for kind in ("f32", "f16", "q8_0", "q4_0")
    ),
    *("gemma4-dense-k256-q4_k_m", "gemma4-dense-k256-mixed"),
]


@pytest.fixture(scope="session")
def recorded(shared_reference: Path) -> dict[str, Any]:
    manifest = json.loads((shared_reference / "fixtures" / "manifest.json").read_text())
    files: dict[str, Any] = manifest["files"]
    assert {name.removesuffix(".gguf") for name in files} == set(NAMES)
    return files


def captured(path: Path) -> tuple[Any, KvSpillDescriptor]:
    with GgufFile.open(path) as file:
        weights = read_config(file, RuntimeConfig(model=str(path)))
    before = copy.deepcopy(weights)
    found = KvSpillDescriptor.from_gemma_loaded_model(weights, 512, KvDType.F16)
    assert weights == before, "capturing reads and never writes"
    return weights, found


@pytest.mark.parametrize("name", NAMES)
def test_a_descriptor_is_what_the_recorded_configuration_says(
    name: str, shared_reference: Path, recorded: dict[str, Any]
) -> None:
    config = recorded[f"{name}.gguf"]["config"]
    _, found = captured(shared_reference / "fixtures" / f"{name}.gguf")
    kinds = tuple(KINDS[kind] for kind in config["layer_types"])
    heads = {LayerType.SLIDING: config["num_key_value_heads"]}
    heads[LayerType.FULL] = config.get("num_global_key_value_heads") or heads[LayerType.SLIDING]
    dims = {LayerType.SLIDING: config["head_dim"]}
    dims[LayerType.FULL] = config.get("global_head_dim") or dims[LayerType.SLIDING]
    assert found == KvSpillDescriptor(
        sliding_window=config["sliding_window"],
        max_decode_tokens=512,
        num_layers=config["num_hidden_layers"],
        layer_types=kinds,
        nkv_heads=tuple(heads[kind] for kind in kinds),
        head_dim=tuple(dims[kind] for kind in kinds),
        kv_dtype=KvDType.F16,
        provenance=KvSpillProvenance(),
        kv_source=shared_sources(kinds, config.get("num_kv_shared_layers") or 0),
    )


def shared_sources(kinds: tuple[LayerType, ...], shared: int) -> tuple[int, ...]:
    """The last layers read K and V of the last layer of their kind that has its own."""
    own = len(kinds) - shared
    if not shared:
        return ()
    last = {kind: max(i for i in range(own) if kinds[i] is kind) for kind in set(kinds[:own])}
    return (*range(own), *(last[kind] for kind in kinds[own:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_dense_spill_takes_the_descriptor_of_every_family(
    name: str, shared_reference: Path
) -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    from millpond.runtime.gemma4_dense_spill import Gemma4DenseSpillFactory

    weights, found = captured(shared_reference / "fixtures" / f"{name}.gguf")
    made = Gemma4DenseSpillFactory(found)
    assert made.groups == KvLayout.from_descriptor(found, 256, 256, 1024).groups
    for layer, one in enumerate(weights.layers):
        stored = one.kv_source == layer
        assert made.block_bytes(layer) == stored * 2 * 256 * one.kv_heads * one.head_dim * 2
        if stored:
            assert made.capacity(layer, 100) == (612 if one.kind is LayerType.FULL else 16)


# -- namespaces


def with_pairs(source: Path, pairs: dict[str, object], target: Path) -> Path:
    """Copy a GGUF with more metadata; a filler keeps the data aligned, so no offset changes."""
    data = source.read_bytes()
    magic, version, tensors, count = struct.unpack_from("<4sIQQ", data)
    whole = pairs | {"x.filler": ""}
    size = sum(len(string_bytes(key) + value_bytes(value)) for key, value in whole.items())
    whole["x.filler"] = "x" * (-size % 32)
    more = b"".join(string_bytes(key) + value_bytes(value) for key, value in whole.items())
    head = struct.pack("<4sIQQ", magic, version, tensors, count + len(whole))
    target.write_bytes(head + more + data[24:])
    return target


def inspected(capfd: Capture, path: Path) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["problem"] == ""
    return found


def test_inspect_prints_heads_and_head_dim_of_every_layer(
    shared_reference: Path, capfd: Capture
) -> None:
    found = inspected(capfd, shared_reference / "fixtures" / "gemma4-dense-tiny-f32.gguf")
    assert found["descriptor"]["layer_types"] == ["sliding", "sliding", "full"] * 2
    assert found["descriptor"]["nkv_heads"] == [2, 2, 1] * 2
    assert found["descriptor"]["head_dim"] == [32, 32, 64] * 2
    assert found["namespace"] == "legacy"


@pytest.mark.parametrize(
    ("pairs", "namespace"),
    [
        ({"hf2q.producer_version": "0.3.1", "hf2q.source_sha256": "AB" * 32}, "strict"),
        ({"hf2q.producer_version": "0.3.1"}, "legacy"),
        ({"hf2q.source_sha256": "ab" * 32}, "legacy"),
        ({"hf2q.producer_version": "0.3.1", "hf2q.source_sha256": ""}, "legacy"),
        ({"hf2q.producer_version": 3, "hf2q.source_sha256": "ab" * 32}, "legacy"),
    ],
)
def test_a_namespace_is_strict_only_with_both_keys(
    pairs: dict[str, object],
    namespace: str,
    shared_reference: Path,
    tmp_path: Path,
    capfd: Capture,
) -> None:
    source = shared_reference / "fixtures" / "gemma4-dense-tiny-q8_0.gguf"
    plain = inspected(capfd, source)
    path = with_pairs(source, pairs, tmp_path / source.name)
    found = inspected(capfd, path)
    assert found["namespace"] == namespace
    assert found["descriptor"]["head_dim"] == plain["descriptor"]["head_dim"]
    assert found["tensor_types"] == plain["tensor_types"]
    named = (found["repo"], found["quant"])
    hashed = plain["provenance"]["tokenizer_chat_template_hash"]
    assert len(hashed) == 64
    if namespace == "strict":
        expected = model_fingerprint(*named, "0.3.1", "ab" * 32, hashed)
    else:
        expected = model_fingerprint(*named, "", "", "")
        assert found["fingerprint"] == plain["fingerprint"]
    assert found["fingerprint"] == expected.hex()
    assert found["provenance"]["tokenizer_chat_template_hash"] == hashed
