"""What becomes of each tensor type: repacked without loss, or dequantised.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from millpond.codecs.quants import DEQUANTISED
from millpond.codecs.repack import REPACKED
from millpond.runtime.errors import UnsupportedModel
from millpond.runtime.gguf_file import StoredTensor


def check_types(tensors: Mapping[str, StoredTensor], needed: Collection[str]) -> None:
    """Raise UnsupportedModel, naming tensor and type, if one of those needed cannot be read."""
    for name in needed:
        found = tensors[name].type.name
        if found not in DEQUANTISED:
            raise UnsupportedModel(
                f"tensor {name!r}: found type {found}, supported are {', '.join(DEQUANTISED)}"
            )


def encoding_of(tensor: StoredTensor, weight_form: str) -> str:
    """Return the encoding in which a tensor is staged.

    dense: always ``f32``.  repacked: ``q<bits>g32`` for a matrix of a type that MLX's affine
    quantisation holds without loss, else ``f32``; a vector is ``f32`` always.
    """
    bits = REPACKED.get(tensor.type.name)
    if weight_form != "repacked" or bits is None or len(tensor.shape) < 2:
        return "f32"
    return f"q{bits}g32"
