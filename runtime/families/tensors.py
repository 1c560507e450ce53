"""Which tensors a configuration needs, and their shapes.  Pure; shapes are row-major (out, in).

Source: llama.cpp's tensor names for ``gemma3``, ``gemma4`` and ``llama``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from millpond.runtime.errors import ModelUnreadable, UnsupportedModel
from millpond.runtime.families.config import LayerConfig, ModelConfig

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
OUTPUT_NORM, ROPE_FREQS = "output_norm.weight", "rope_freqs.weight"

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig, present: Collection[str]) -> dict[str, Shape]:
    """Return name → shape of every tensor that the forward pass reads.

    present  names in the file; they decide about what may be left out or spelled in two ways:
             ``output.weight`` (else the embedding is the head), ``attn_v`` (else V is made from the
             K projection, Gemma 4), fused or split gate and up experts, ``rope_freqs`` (llama)

    Tensors of the file that are not in the result are never read: K and V of layers that share
    another layer's, mostly.
    """
    hidden = config.hidden
    expected: dict[str, Shape] = {EMBEDDING: (config.vocab, hidden), OUTPUT_NORM: (hidden,)}
    if OUTPUT in present:
        expected[OUTPUT] = (config.vocab, hidden)
    needs_freqs = [layer for layer in config.layers if layer.use_rope_freqs]
    if needs_freqs:
        expected[ROPE_FREQS] = (needs_freqs[0].rope_dims // 2,)
    if config.per_layer_input:
        expected |= _per_layer_embedding(config)
    for index, layer in enumerate(config.layers):
        own = _layer(config, index, layer, present)
        expected |= {f"blk.{index}.{name}": shape for name, shape in own.items()}
    return expected


def check_tensors(config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return ``expected_tensors`` if the file has them all in the right shape.

    Raises ModelUnreadable (one is missing or has another shape) and UnsupportedModel (a layer has a
    tensor that the forward pass would ignore, so that its numbers would be wrong).
    """
    expected = expected_tensors(config, shapes.keys())
    for name, shape in expected.items():
        found = shapes.get(name)
        if found is None:
            raise ModelUnreadable(f"tensor {name!r}: found none, expected shape {shape}")
        if found != shape:
            raise ModelUnreadable(f"tensor {name!r}: found shape {found}, expected {shape}")
    for name in shapes:
        if name not in expected and not _may_be_ignored(config, name):
            raise UnsupportedModel(
                f"tensor {name!r}: found in a {config.family} file, supported are its usual tensors"
            )
    return expected


def _may_be_ignored(config: ModelConfig, name: str) -> bool:
    """True for what no forward pass of the family reads, though files carry it."""
    parts = name.split(".")
    if name == ROPE_FREQS or "rot_embd" in name:
        return True  # the frequencies of plain rotation, which old converters wrote out
    if parts[0] != "blk" or len(parts) < 3 or not parts[1].isdecimal():
        return False
    index = int(parts[1])
    if index >= len(config.layers):
        return False
    shares = config.layers[index].kv_source != index
    return shares and parts[2] in ("attn_k", "attn_v", "attn_k_norm")


def _layer(
    config: ModelConfig, index: int, layer: LayerConfig, present: Collection[str]
) -> dict[str, Shape]:
    hidden, width = config.hidden, layer.feed_forward
    query, keys = config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    own: dict[str, Shape] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query, hidden),
        "attn_output.weight": (hidden, query),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (width, hidden),
        "ffn_up.weight": (width, hidden),
        "ffn_down.weight": (hidden, width),
    }
    owns_kv = layer.kv_source == index
    if owns_kv:
        own["attn_k.weight"] = (keys, hidden)
        if config.family != "gemma4" or f"blk.{index}.attn_v.weight" in present:
            own["attn_v.weight"] = (keys, hidden)
    if config.family == "llama":
        return own
    own["attn_q_norm.weight"] = (layer.head_dim,)
    if owns_kv:
        own["attn_k_norm.weight"] = (layer.head_dim,)
    own |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    if config.family == "gemma4":
        own |= _gemma4_layer(config, f"blk.{index}.", present)
    return own


def _gemma4_layer(config: ModelConfig, prefix: str, present: Collection[str]) -> dict[str, Shape]:
    hidden, per_layer = config.hidden, config.per_layer_input
    own: dict[str, Shape] = {"layer_output_scale.weight": (1,)}
    if per_layer:
        own["inp_gate.weight"] = (per_layer, hidden)
        own["proj.weight"] = (hidden, per_layer)
        own["post_norm.weight"] = (hidden,)
    if not config.experts:
        return own
    experts, width = config.experts, config.expert_feed_forward
    own |= {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_inp.scale": (hidden,),
        "ffn_down_exps.weight": (experts, hidden, width),
        "ffn_down_exps.scale": (experts,),
        "pre_ffw_norm_2.weight": (hidden,),
        "post_ffw_norm_1.weight": (hidden,),
        "post_ffw_norm_2.weight": (hidden,),
    }
    if f"{prefix}ffn_gate_up_exps.weight" in present:
        return own | {"ffn_gate_up_exps.weight": (experts, 2 * width, hidden)}
    return own | {
        "ffn_gate_exps.weight": (experts, width, hidden),
        "ffn_up_exps.weight": (experts, width, hidden),
    }


def _per_layer_embedding(config: ModelConfig) -> dict[str, Shape]:
    per_layer = config.per_layer_input
    columns = len(config.layers) * per_layer
    return {
        "per_layer_token_embd.weight": (config.vocab, columns),
        "per_layer_model_proj.weight": (columns, config.hidden),
        "per_layer_proj_norm.weight": (per_layer,),
    }
