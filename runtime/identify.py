"""From an open model file to its ``ModelIdentity``: shape, namespace, guard, vocabulary.

Reads the whole file once (the tensor digest); everything else comes from the header.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
from millpond.codecs.descriptors import KvSpillDescriptor, KvSpillProvenance, LayerType
from millpond.codecs.fingerprint import (
    GuardInputs,
    NumericsIdentity,
    kv_guard,
    namespace_fingerprint,
    namespace_of,
)
from millpond.runtime.config import RuntimeConfig, resolve_kv_dtype
from millpond.runtime.errors import ConfigError
from millpond.runtime.families.config import ModelConfig
from millpond.runtime.families.config_gguf import FAMILY_REVISIONS, model_config
from millpond.runtime.families.tensors import check_tensors
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.tensor_digest import combined_digest, tensor_digests
from millpond.runtime.tensor_types import check_types
from millpond.runtime.vocabulary import read_vocabulary

# Names of ``general.file_type``; source: the file types of llama.cpp.
_FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
}


def identify(
    file: GgufFile,
    config: RuntimeConfig,
    numerics: NumericsIdentity,
    environment: Mapping[str, str],
    digests: Callable[[], Mapping[str, bytes]] | None = None,
) -> ModelIdentity:
    """Return the identity of an open model file.  Blocks while it reads every tensor.

    environment  looked at once, for the KV dtype
    digests      returns those of ``digesting``; None: they are made here

    Raises ModelUnreadable, UnsupportedModel, TokenizerError, ConfigError or DescriptorError.
    """
    shape = read_config(file, config)
    descriptor = describe(file, shape, config, numerics, environment)
    vocabulary = read_vocabulary(file.metadata, shape.vocab)
    repo, quant = repo_of(file, config), quant_of(file)
    tensors_sha256 = combined_digest(file.tensors, digests() if digests else tensor_digests(file))
    return ModelIdentity(
        name=name_of(file),
        repo=repo,
        quant=quant,
        config=shape,
        descriptor=descriptor,
        fingerprint=namespace_fingerprint(repo, quant, descriptor.provenance),
        namespace=namespace_of(descriptor.provenance),
        guard=kv_guard(_guard_inputs(shape, descriptor, config, (tensors_sha256, numerics))),
        tensors_sha256=tensors_sha256,
        numerics=numerics,
        vocabulary=vocabulary,
    )


def read_config(file: GgufFile, config: RuntimeConfig) -> ModelConfig:
    """Return the checked shape of the model, its context cut to what is configured.

    Raises ModelUnreadable, UnsupportedModel or ConfigError.
    """
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    found = model_config(file.metadata, shapes)
    check_types(file.tensors, check_tensors(found, shapes))
    if config.context_tokens is None:
        return found
    if config.context_tokens < 1:
        raise ConfigError(f"context_tokens: found {config.context_tokens}, expected at least 1")
    return replace(found, context_tokens=min(config.context_tokens, found.context_tokens))


def describe(
    file: GgufFile,
    shape: ModelConfig,
    config: RuntimeConfig,
    numerics: NumericsIdentity,
    environment: Mapping[str, str],
) -> KvSpillDescriptor:
    """Return the KV shape and the provenance of an open model file."""
    return KvSpillDescriptor.from_gemma_loaded_model(
        shape,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, numerics.compute_dtype, environment),
        provenance=KvSpillProvenance.from_metadata(file.metadata),
    )


def name_of(file: GgufFile) -> str:
    """Return ``general.name``, else the file's stem; what is not UTF-8 in a stem is replaced."""
    name = file.metadata.get("general.name")
    if isinstance(name, str) and name:
        return name
    return os.fsencode(file.path.stem).decode(errors="replace")


def repo_of(file: GgufFile, config: RuntimeConfig) -> str:
    """Return the configured name of the cache namespace, else ``general.name``, else the stem.

    Raises ConfigError if the configured one cannot be written in UTF-8.
    """
    if config.repo is None:
        return name_of(file)
    try:
        config.repo.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"repo: found {config.repo!r}, expected text in UTF-8") from None
    return config.repo


def quant_of(file: GgufFile) -> str:
    """Return the name of ``general.file_type``, ``""`` if it is absent or unknown."""
    number = file.metadata.get("general.file_type")
    return _FILE_TYPES.get(number, "") if isinstance(number, int) else ""


def _guard_inputs(
    shape: ModelConfig,
    descriptor: KvSpillDescriptor,
    config: RuntimeConfig,
    build: tuple[str, NumericsIdentity],
) -> GuardInputs:
    tensors_sha256, numerics = build
    chunk_tokens = config.chunk_tokens_on(numerics.device_kind)
    layout = KvLayout.from_descriptor(
        descriptor,
        config.block_tokens,
        chunk_tokens,
        config.sliding_boundary_on(numerics.device_kind),
    )
    return GuardInputs(
        tensors_sha256=tensors_sha256,
        family=shape.family,
        family_revision=FAMILY_REVISIONS[shape.family],
        rope=_rope(shape),
        kv_dtype=descriptor.kv_dtype.value,
        groups=tuple(group.name for group in layout.groups),
        block_tokens=config.block_tokens,
        chunk_tokens=chunk_tokens,
        numerics=numerics,
        constants=_constants(shape),
    )


def _rope(shape: ModelConfig) -> tuple[str, ...]:
    """RoPE parameters of each kind of layer; ``repr`` of a float keeps every bit."""
    lines = [f"interleaved={shape.interleaved_rope}"]
    for kind in LayerType:
        found = {
            f"{kind.value}.base={layer.rope_base!r}.dims={layer.rope_dims}"
            f".scale={layer.rope_scale!r}.freqs={layer.use_rope_freqs}"
            for layer in shape.layers
            if layer.kind is kind
        }
        lines.extend(sorted(found))
    return tuple(lines)


def _constants(shape: ModelConfig) -> tuple[str, ...]:
    """What else of the metadata changes K and V: two files may share tensors and differ here."""
    kinds = "".join(layer.kind.value[0] for layer in shape.layers)
    sources = ",".join(str(layer.kv_source) for layer in shape.layers)
    return (
        f"layers={kinds}",
        f"kv_source={sources}",
        f"heads={shape.heads}",
        f"window={shape.sliding_window}",
        f"norm_eps={shape.norm_eps!r}",
        f"attention_scale={shape.attention_scale!r}",
        f"embedding_scale={shape.embedding_scale!r}",
        f"experts_used={shape.experts_used}",
    )


def identity_summary(identity: ModelIdentity) -> dict[str, object]:
    """Return what names the model's cache, for logs and reports: hex digests and the numerics."""
    return {
        "name": identity.name,
        "repo": identity.repo,
        "quant": identity.quant,
        "namespace": identity.namespace,
        "fingerprint": identity.fingerprint.hex(),
        "guard": identity.guard.hex(),
        "tensors_sha256": identity.tensors_sha256,
        "numerics": msgspec.to_builtins(identity.numerics),
    }
