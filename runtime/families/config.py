"""Shape and constants of a model, from GGUF metadata; no MLX here.

Sources of keys, defaults and formulas: llama.cpp's GGUF conventions as collected in the project's
facts file (``gemma3.*``, ``gemma4.*``, ``llama.*``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.codecs.descriptors import LayerType


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer.

    kind          sliding or full attention
    kv_heads, head_dim  of this layer's K and V
    feed_forward  width F of its MLP
    rope_base, rope_dims  frequency base and count of rotated elements
    rope_scale    factor on positions (1/8 for linear scaling by 8)
    use_rope_freqs  divide frequencies by the ``rope_freqs`` tensor
    kv_source     layer whose K and V this one reads; itself unless shared
    """

    kind: LayerType
    kv_heads: int
    head_dim: int
    feed_forward: int
    rope_base: float
    rope_dims: int
    rope_scale: float = 1.0
    use_rope_freqs: bool = False
    kv_source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A whole model; satisfies ``GemmaLoadedModel`` of ``codecs.descriptors``.

    family            architecture name: ``gemma3``, ``gemma4``, ``llama``
    vocab             rows of the embedding
    hidden            D
    heads             query heads H
    norm_eps          epsilon of every RMSNorm
    attention_scale   factor on q·k
    embedding_scale   factor on embeddings
    logit_softcap     c of c·tanh(x/c), or 0
    per_layer_input   P of per-layer embeddings, or 0
    experts, experts_used, expert_feed_forward  MoE, or 0
    interleaved_rope  pairs (2j, 2j+1) instead of (j, j + d/2)
    context_tokens    trained context
    layers            one entry per layer
    """

    family: str
    vocab: int
    hidden: int
    heads: int
    norm_eps: float
    attention_scale: float
    embedding_scale: float
    logit_softcap: float
    context_tokens: int
    sliding_window: int
    layers: tuple[LayerConfig, ...]
    per_layer_input: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    interleaved_rope: bool = False
    suppress_tokens: tuple[int, ...] = field(default=())

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """Kind of each layer."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def kv_source(self) -> tuple[int, ...]:
        """For each layer the layer whose K and V it reads; empty if each reads its own."""
        source = tuple(layer.kv_source for layer in self.layers)
        return () if source == tuple(range(len(source))) else source

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the sliding layers (of all, if none slides)."""
        return self._first(LayerType.SLIDING).kv_heads

    @property
    def head_dim(self) -> int:
        """Head size of the sliding layers (of all, if none slides)."""
        return self._first(LayerType.SLIDING).head_dim

    @property
    def num_global_key_value_heads(self) -> int:
        """KV heads of the full layers."""
        return self._first(LayerType.FULL).kv_heads

    @property
    def global_head_dim(self) -> int:
        """Head size of the full layers."""
        return self._first(LayerType.FULL).head_dim

    def _first(self, kind: LayerType) -> LayerConfig:
        return next((layer for layer in self.layers if layer.kind is kind), self.layers[0])
