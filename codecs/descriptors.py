"""The seed's vocabulary: the immutable KV shape of a model, and the provenance of its file.

Invariants

(I1) A descriptor is captured once, before the weights move to the pinned thread, and never changes.
(I2) It is plain data and enforces no lengths: whoever consumes it refuses unequal lengths.
(I3) Same fields, same bytes: encoding is deterministic.

Source of the vocabulary: the ``KvSpillDescriptor`` of the Rust program hf2q.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from millpond.codecs.errors import DescriptorError

PRODUCER_KEY = "hf2q.producer_version"
SOURCE_KEY = "hf2q.source_sha256"
TEMPLATE_KEY = "tokenizer.chat_template"


class KvDType(enum.Enum):
    """Element type of cached keys and values; default ``F32``; ``BF16`` an extension."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def elem_bytes(self) -> int:
        """Bytes of one element: 4 for F32, 2 for F16 and BF16."""
        return 4 if self is KvDType.F32 else 2

    @property
    def safetensors_name(self) -> str:
        """The name that a safetensors header uses: ``F32``, ``F16`` or ``BF16``."""
        return self.value.upper()

    def to_mlx_dtype(self) -> Any:
        """Return the ``mlx.core.Dtype``.

        The only place in ``codecs`` that touches MLX, and it does so when called: importing this
        module never imports MLX.
        """
        return getattr(importlib.import_module("mlx.core"), _MLX_NAMES[self])

    @classmethod
    def from_mlx_dtype(cls, dtype: object) -> KvDType:
        """Return the member for an ``mlx.core.Dtype``; raise DescriptorError for any other one."""
        name = str(dtype).removeprefix("mlx.core.")
        for member, mlx_name in _MLX_NAMES.items():
            if name == mlx_name:
                return member
        known = ", ".join(_MLX_NAMES.values())
        raise DescriptorError(f"KV dtype: found {name!r}, expected one of {known}")


_MLX_NAMES: Mapping[KvDType, str] = {
    KvDType.F32: "float32",
    KvDType.F16: "float16",
    KvDType.BF16: "bfloat16",
}


class LayerType(enum.Enum):
    """Which earlier tokens a layer attends to: a sliding window of them, or all."""

    SLIDING = "sliding"
    FULL = "full"


class KvSpillProvenance(msgspec.Struct, frozen=True):
    """Where a model file came from; decides which namespace its cache lives in.

    producer_version             version of hf2q that wrote the file, ``""`` for any other producer
    source_sha256                lowercase hex SHA-256 of hf2q's source, ``""`` likewise
    tokenizer_chat_template_hash lowercase hex SHA-256 of the chat template, ``""`` for none
    """

    producer_version: str = ""
    source_sha256: str = ""
    tokenizer_chat_template_hash: str = ""

    @property
    def is_hf2q(self) -> bool:
        """True iff producer or source is known; the template hash is not looked at."""
        return bool(self.producer_version or self.source_sha256)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> KvSpillProvenance:
        """Detect the provenance from GGUF metadata.

        Both hf2q keys present, strings and non-empty: their values, the hash lower-cased.  Any
        other shape is an External file: both fields empty.  The template hash is always taken.
        """
        producer, source = metadata.get(PRODUCER_KEY), metadata.get(SOURCE_KEY)
        template = metadata.get(TEMPLATE_KEY)
        hashed = hash_chat_template(template if isinstance(template, str) else "")
        if isinstance(producer, str) and isinstance(source, str) and producer and source:
            return cls(producer, source.lower(), hashed)
        return cls(tokenizer_chat_template_hash=hashed)


def hash_chat_template(text: str) -> str:
    """Return the lowercase hex SHA-256 of the UTF-8 text, ``""`` for ``""``."""
    if not text:
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class GemmaLoadedModel(Protocol):
    """What ``KvSpillDescriptor.from_gemma_loaded_model`` reads of loaded weights, and nothing else.

    kv_source  for layer ``i`` the layer whose K and V it reads; empty means each its own
    """

    @property
    def sliding_window(self) -> int: ...
    @property
    def layer_types(self) -> Sequence[LayerType]: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_global_key_value_heads(self) -> int: ...
    @property
    def global_head_dim(self) -> int: ...
    @property
    def kv_source(self) -> Sequence[int]: ...


class KvSpillDescriptor(msgspec.Struct, frozen=True):
    """The KV shape of a model, one tuple entry per layer.

    sliding_window     tokens that a sliding layer sees, the current one included
    max_decode_tokens  decode tokens that ``Gemma4DenseSpill`` makes room for
    num_layers         count of layers
    layer_types        sliding or full, per layer
    nkv_heads          KV heads, per layer
    head_dim           elements of one head, per layer
    kv_dtype           element type of K and V in every layer
    provenance         where the model file came from
    kv_source          for layer ``i`` the layer whose K and V it reads; empty: each its own
    """

    sliding_window: int
    max_decode_tokens: int
    num_layers: int
    layer_types: tuple[LayerType, ...]
    nkv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    kv_dtype: KvDType
    provenance: KvSpillProvenance
    kv_source: tuple[int, ...] = ()

    @classmethod
    def from_gemma_loaded_model(
        cls,
        weights: GemmaLoadedModel,
        max_decode_tokens: int = 512,
        kv_dtype: KvDType = KvDType.F32,
        provenance: KvSpillProvenance | None = None,
    ) -> KvSpillDescriptor:
        """Capture the shape of loaded weights; reads them and never changes them.

        Sliding layers carry ``num_key_value_heads`` and ``head_dim``, full layers
        ``num_global_key_value_heads`` and ``global_head_dim``.
        """
        types = tuple(weights.layer_types)
        sliding = (weights.num_key_value_heads, weights.head_dim)
        full = (weights.num_global_key_value_heads, weights.global_head_dim)
        shapes = [sliding if kind is LayerType.SLIDING else full for kind in types]
        return cls(
            sliding_window=weights.sliding_window,
            max_decode_tokens=max_decode_tokens,
            num_layers=len(types),
            layer_types=types,
            nkv_heads=tuple(heads for heads, _ in shapes),
            head_dim=tuple(dim for _, dim in shapes),
            kv_dtype=kv_dtype,
            provenance=provenance if provenance is not None else KvSpillProvenance(),
            kv_source=tuple(weights.kv_source),
        )
