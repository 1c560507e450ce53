"""Typed, bounded access to the metadata of one architecture; every refusal names key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from millpond.codecs.gguf_values import brief
from millpond.runtime.errors import ModelUnreadable

SIZE_MAX = 2**24  # widths, counts of rows; the largest real ones are below 2^19


class Metadata:
    """The pairs of a GGUF, read as ``<architecture>.<key>``.

    Every method raises ModelUnreadable on a missing, mistyped or senseless value.
    """

    def __init__(self, architecture: str, pairs: Mapping[str, object]) -> None:
        self.architecture = architecture
        self._pairs = pairs

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """Return an integer from ``least`` to ``most``; a missing one is ``default``."""
        value = self._find(key, default)
        return self._whole(key, value, least, most)

    def number(self, key: str, default: float | None = None, *, most: float) -> float:
        """Return a finite float, more than 0 and at most ``most``."""
        value = self._find(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value) if abs(value) < 2**63 else math.inf
            if 0 < number <= most:
                return number
        raise self._refuse(key, value, f"a number above 0 and at most {most:g}")

    def number_or_zero(self, key: str, default: float, *, most: float) -> float:
        """Return a number as ``number`` does; 0 is allowed and means "off"."""
        value = self._find(key, default)
        if isinstance(value, int | float) and value == 0:
            return 0.0
        return self.number(key, default, most=most)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self._refuse(key, value, "a string")
        return value

    def counts(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """Return one integer per layer, from a scalar or an array of that many."""
        value = self._find(key, default)
        if isinstance(value, np.ndarray):
            if len(value) != layers:
                raise self._refuse(key, value, f"one entry for each of {layers} layers")
            return tuple(self._whole(key, entry, 1, SIZE_MAX) for entry in value.tolist())
        return (self._whole(key, value, 1, SIZE_MAX),) * layers

    def flags(self, key: str, layers: int) -> tuple[bool, ...] | int:
        """Return one bool per layer, or the scalar that stands for a pattern."""
        value = self._find(key, None)
        if not isinstance(value, np.ndarray):
            return self._whole(key, value, 0, SIZE_MAX)
        if len(value) != layers or any(entry not in (0, 1) for entry in value.tolist()):
            raise self._refuse(key, value, f"one bool for each of {layers} layers")
        return tuple(bool(entry) for entry in value.tolist())

    def has(self, key: str) -> bool:
        """True iff the key is there."""
        return f"{self.architecture}.{key}" in self._pairs

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """Return an array of token ids below ``vocab`` by its full key; empty if absent."""
        value = self._pairs.get(key)
        if value is None:
            return ()
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) <= vocab:
            ids = tuple(int(entry) for entry in value.tolist())
            if all(0 <= one < vocab for one in ids):
                return ids
        raise ModelUnreadable(f"{key}: found {brief(value)}, expected token ids below {vocab}")

    def _find(self, key: str, default: object) -> object:
        value = self._pairs.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelUnreadable(f"{self.architecture}.{key}: found no such key, expected it")
        return value

    def _whole(self, key: str, value: object, least: int, most: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise self._refuse(key, value, f"an integer from {least} to {most}")

    def _refuse(self, key: str, value: object, expected: str) -> ModelUnreadable:
        return ModelUnreadable(
            f"{self.architecture}.{key}: found {brief(value)}, expected {expected}"
        )
