"""GGUF metadata → ``ModelConfig``, one builder per family; no MLX here.

Sources of keys, defaults and quirks: llama.cpp's readers of ``gemma3``, ``gemma4``, ``llama``, as
collected in the project's facts file.  A number is never taken from a table of known models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from millpond.codecs.descriptors import LayerType
from millpond.codecs.gguf_values import brief
from millpond.runtime.errors import ModelUnreadable, UnsupportedModel
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.families.metadata import SIZE_MAX, Metadata

LAYERS_MAX = 1024
HEADS_MAX = 4096
HEAD_DIM_MAX = 4096
CONTEXT_MAX = 2**31 - 1
EXPERTS_MAX = 4096
ROPE_BASE_MAX = 1e12
ROPE_BASE_DEFAULT = 10_000.0
GEMMA3_PATTERN_DEFAULT = 6
GEMMA3_27B_LAYERS = 62
GEMMA4_SOFTCAP_DEFAULT = 30.0
ROPE_FREQS = "rope_freqs.weight"
SOFTCAP = "final_logit_softcapping"

# Numerics versions of the forward passes; a change that moves a bit of K or V counts one up.
FAMILY_REVISIONS: Mapping[str, int] = {"gemma3": 1, "gemma4": 1, "llama": 1}

Shapes = Mapping[str, tuple[int, ...]]


def model_config(metadata: Mapping[str, object], shapes: Shapes) -> ModelConfig:
    """Build the configuration of a file.

    metadata  pairs of the GGUF
    shapes    row-major shape of each tensor in the file, by name

    Raises UnsupportedModel (architecture or feature that is not served) and ModelUnreadable (a
    missing, mistyped or senseless value; key, found and expected are named).
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelUnreadable(f"general.architecture: found {brief(architecture)}, expected a name")
    build = _BUILDERS.get(architecture)
    if build is None:
        served = ", ".join(_BUILDERS)
        raise UnsupportedModel(f"architecture: found {brief(architecture)}, supported are {served}")
    config = build(Metadata(architecture, metadata), shapes)
    _check_layers(config)
    return config


def _gemma3(metadata: Metadata, shapes: Shapes) -> ModelConfig:
    base = _base(metadata, shapes)
    count, hidden, heads = len(base.layers), base.hidden, base.heads
    window = metadata.count("attention.sliding_window", 0, least=0, most=CONTEXT_MAX)
    kinds = _gemma3_kinds(metadata, count) if window else (LayerType.FULL,) * count
    swa_base = metadata.number("rope.freq_base_swa", ROPE_BASE_DEFAULT, most=ROPE_BASE_MAX)
    layers = tuple(
        replace(layer, kind=kind)
        if kind is LayerType.FULL
        else replace(layer, kind=kind, rope_base=swa_base, rope_scale=1.0)
        for layer, kind in zip(base.layers, kinds, strict=True)
    )
    # No key tells the attention scale; the 27B, known by its 62 layers, has its own.
    width = hidden / heads if count == GEMMA3_27B_LAYERS else layers[0].head_dim
    return replace(
        base,
        attention_scale=width**-0.5,
        embedding_scale=math.sqrt(hidden),
        logit_softcap=metadata.number_or_zero(SOFTCAP, 0.0, most=1e6),
        sliding_window=window,
        layers=layers,
    )


def _gemma3_kinds(metadata: Metadata, count: int) -> tuple[LayerType, ...]:
    key = "attention.sliding_window_pattern"
    pattern = metadata.flags(key, count) if metadata.has(key) else GEMMA3_PATTERN_DEFAULT
    return _kinds(pattern, count)


def _kinds(pattern: tuple[bool, ...] | int, count: int) -> tuple[LayerType, ...]:
    """Kinds from one bool per layer (True slides), or from n: every n-th layer is full."""
    if isinstance(pattern, int):
        pattern = tuple(not pattern or index % pattern < pattern - 1 for index in range(count))
    return tuple(LayerType.SLIDING if slides else LayerType.FULL for slides in pattern)


def _gemma4(metadata: Metadata, shapes: Shapes) -> ModelConfig:
    base = _base(metadata, shapes)
    count, hidden = len(base.layers), base.hidden
    kinds = _kinds(metadata.flags("attention.sliding_window_pattern", count), count)
    sliding_dim = metadata.count("attention.key_length_swa", most=HEAD_DIM_MAX)
    _check_value_length(metadata, "attention.value_length_swa", sliding_dim)
    # rope.dimension_count is that of the full layers, so it is no default here.
    sliding_rope = metadata.count("rope.dimension_count_swa", sliding_dim, most=HEAD_DIM_MAX)
    swa_base = metadata.number("rope.freq_base_swa", ROPE_BASE_DEFAULT, most=ROPE_BASE_MAX)
    sources = _kv_sources(metadata, kinds)
    layers = []
    for index, (layer, kind) in enumerate(zip(base.layers, kinds, strict=True)):
        changed = replace(layer, kind=kind, kv_source=sources[index])
        if kind is LayerType.SLIDING:
            changed = replace(
                changed,
                head_dim=sliding_dim,
                rope_base=swa_base,
                rope_dims=sliding_rope,
                rope_scale=1.0,
                use_rope_freqs=False,
            )
        layers.append(changed)
    experts = metadata.count("expert_count", 0, least=0, most=EXPERTS_MAX)
    return replace(
        base,
        attention_scale=1.0,
        embedding_scale=math.sqrt(hidden),
        logit_softcap=metadata.number_or_zero(SOFTCAP, GEMMA4_SOFTCAP_DEFAULT, most=1e6),
        sliding_window=metadata.count("attention.sliding_window", most=CONTEXT_MAX),
        layers=tuple(layers),
        per_layer_input=metadata.count(
            "embedding_length_per_layer_input", 0, least=0, most=SIZE_MAX
        ),
        experts=experts,
        experts_used=metadata.count("expert_used_count", most=experts) if experts else 0,
        expert_feed_forward=(
            metadata.count("expert_feed_forward_length", most=SIZE_MAX) if experts else 0
        ),
        suppress_tokens=metadata.token_ids("tokenizer.ggml.suppress_tokens", base.vocab),
    )


def _kv_sources(metadata: Metadata, kinds: tuple[LayerType, ...]) -> tuple[int, ...]:
    """Layer whose K and V each layer reads: the last n read the last owner of their kind."""
    count = len(kinds)
    shared = metadata.count("attention.shared_kv_layers", 0, least=0, most=count - 1)
    owners = count - shared
    last_owner = {kind: index for index, kind in enumerate(kinds[:owners])}
    for kind in kinds[owners:]:
        if kind not in last_owner:
            raise ModelUnreadable(
                f"{metadata.architecture}.attention.shared_kv_layers: found {shared}, "
                f"expected a {kind.value} layer before the shared ones"
            )
    return (*range(owners), *(last_owner[kind] for kind in kinds[owners:]))


def _llama(metadata: Metadata, shapes: Shapes) -> ModelConfig:
    if metadata.count("expert_count", 0, least=0, most=EXPERTS_MAX):
        raise UnsupportedModel("llama.expert_count: found experts, supported are dense models")
    base = _base(metadata, shapes)
    scale = metadata.number_or_zero("attention.scale", 0.0, most=1e3)
    return replace(
        base,
        attention_scale=scale or base.layers[0].head_dim ** -0.5,
        interleaved_rope=True,
    )


def _base(metadata: Metadata, shapes: Shapes) -> ModelConfig:
    """What all families read alike, every layer a full one with K and V of its own."""
    count = metadata.count("block_count", most=LAYERS_MAX)
    hidden = metadata.count("embedding_length", most=SIZE_MAX)
    heads = _uniform(metadata, "attention.head_count", count)
    if heads > HEADS_MAX:
        raise ModelUnreadable(
            f"{metadata.architecture}.attention.head_count: found {heads}, "
            f"expected at most {HEADS_MAX}"
        )
    head_dim = metadata.count("attention.key_length", hidden // heads, most=HEAD_DIM_MAX)
    _check_value_length(metadata, "attention.value_length", head_dim)
    kv_heads = metadata.counts("attention.head_count_kv", count, heads)
    widths = metadata.counts("feed_forward_length", count)
    rope_base = metadata.number("rope.freq_base", ROPE_BASE_DEFAULT, most=ROPE_BASE_MAX)
    rope_dims = metadata.count("rope.dimension_count", head_dim, most=HEAD_DIM_MAX)
    rope_scale = _rope_scale(metadata)
    # Gemma 4's full layers cannot be rotated without the tensor, so it must be there.
    uses_freqs = metadata.architecture == "gemma4" or (
        metadata.architecture == "llama" and ROPE_FREQS in shapes
    )
    layers = tuple(
        LayerConfig(
            kind=LayerType.FULL,
            kv_heads=kv_heads[index],
            head_dim=head_dim,
            feed_forward=widths[index],
            rope_base=rope_base,
            rope_dims=rope_dims,
            rope_scale=rope_scale,
            use_rope_freqs=uses_freqs,
            kv_source=index,
        )
        for index in range(count)
    )
    return ModelConfig(
        family=metadata.architecture,
        vocab=_vocab(shapes),
        hidden=hidden,
        heads=heads,
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon", most=1.0),
        attention_scale=1.0,
        embedding_scale=1.0,
        logit_softcap=0.0,
        context_tokens=metadata.count("context_length", most=CONTEXT_MAX),
        sliding_window=0,
        layers=layers,
    )


def _vocab(shapes: Shapes) -> int:
    """Rows of the embedding: converters cut what lies beyond the tokenizer, so no key tells it."""
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise ModelUnreadable(
            f"tensor 'token_embd.weight': found {shape or 'none'}, expected a matrix"
        )
    return shape[0]


def _uniform(metadata: Metadata, key: str, layers: int) -> int:
    values = metadata.counts(key, layers)
    if len(set(values)) > 1:
        raise UnsupportedModel(
            f"{metadata.architecture}.{key}: found {sorted(set(values))}, "
            "supported is one number for all layers"
        )
    return values[0]


def _check_value_length(metadata: Metadata, key: str, head_dim: int) -> None:
    found = metadata.count(key, head_dim, most=HEAD_DIM_MAX)
    if found != head_dim:
        raise UnsupportedModel(
            f"{metadata.architecture}.{key}: found {found}, supported is {head_dim}, as for keys"
        )


def _rope_scale(metadata: Metadata) -> float:
    kind = metadata.text("rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        raise UnsupportedModel(
            f"{metadata.architecture}.rope.scaling.type: found {brief(kind)}, "
            "supported are linear and none"
        )
    key = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    factor = metadata.number_or_zero(key, 0.0, most=1e6) if kind == "linear" else 0.0
    return 1.0 / factor if factor else 1.0


def _check_layers(config: ModelConfig) -> None:
    """Refuse layers that the forward passes or the KV descriptor cannot express."""
    seen: dict[LayerType, tuple[int, int]] = {}
    for index, layer in enumerate(config.layers):
        where = f"{config.family} layer {index}"
        if config.heads % layer.kv_heads:
            raise ModelUnreadable(
                f"{where}: found {layer.kv_heads} KV heads, expected a divisor of {config.heads}"
            )
        if layer.rope_dims % 2 or layer.rope_dims > layer.head_dim:
            raise ModelUnreadable(
                f"{where}: found {layer.rope_dims} rotated elements, "
                f"expected an even number up to {layer.head_dim}"
            )
        shape = (layer.kv_heads, layer.head_dim)
        if seen.setdefault(layer.kind, shape) != shape:
            raise UnsupportedModel(
                f"{where}: found KV heads and head size {shape}, "
                f"supported is {seen[layer.kind]}, as in the other {layer.kind.value} layers"
            )


_BUILDERS: Mapping[str, Callable[[Metadata, Shapes], ModelConfig]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama": _llama,
}
