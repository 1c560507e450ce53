"""Every family computes what other software recorded, however the tokens are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.kv.cache import RowError
from millpond.runtime.testing.direct import load_direct
from millpond.runtime.testing.reading import DirectModel
from millpond.runtime.testing.reference import (
    MODES,
    REAL_TOLERANCES,
    TOLERANCES,
    Mode,
    compare,
    compare_real,
    recorded_lengths,
)

FORMS = ("f32", "f16", "q8_0", "q4_0")
FAMILIES = ("gemma3-tiny", "gemma4-dense-tiny", "gemma4-ple-tiny", "gemma4-moe-tiny")
STEMS = (
    *(f"{family}-{form}" for family in FAMILIES for form in FORMS),
    "gemma3-27b-tiny-q8_0",
    "gemma4-dense-k256-q4_k_m",
    "gemma4-dense-k256-mixed",
)
MODES_OF = {17: MODES, 48: MODES[1:], 200: MODES[1:2], 300: MODES[:1]}  # the window is 16
REAL_RUNS = (2, 9)  # 600 tokens, beyond the window of 512, and a chat; the script runs them all


def modes_of(lengths: list[int]) -> Iterator[tuple[int, Mode]]:
    """Chunks and steps around the window, each long way once."""
    for length in lengths:
        yield from ((length, mode) for mode in MODES_OF.get(length, MODES[:1]))


@cache
def loaded(path: Path, kv_dtype: str, weight_form: str | None = None) -> DirectModel:
    config = RuntimeConfig(model=str(path), kv_dtype=kv_dtype, weight_form=weight_form)  # type: ignore[arg-type]
    return load_direct(path, config)[2]


@pytest.mark.parametrize("stem", STEMS)
def test_logits_are_the_recorded_ones(shared_reference: Path, stem: str) -> None:
    path = shared_reference / "fixtures" / f"{stem}.gguf"
    with np.load(path.with_suffix(".npz")) as arrays:
        for length, mode in modes_of(recorded_lengths(arrays)):
            found = compare(loaded(path, "f32"), arrays, length, mode)
            assert found.is_within(TOLERANCES["f32"]), (length, mode, found)


@pytest.mark.parametrize("stem", [f"{family}-q4_0" for family in FAMILIES])
def test_repacked_weights_give_the_same_logits(shared_reference: Path, stem: str) -> None:
    path = shared_reference / "fixtures" / f"{stem}.gguf"
    with np.load(path.with_suffix(".npz")) as arrays:
        for mode in MODES:
            found = compare(loaded(path, "f32", "repacked"), arrays, 48, mode)
            assert found.is_within(TOLERANCES["f32"]), (mode, found)


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("stem", [f"{family}-f32" for family in FAMILIES])
def test_rows_in_half_precision_stay_within_their_tolerance(
    shared_reference: Path, stem: str, kv_dtype: str
) -> None:
    path = shared_reference / "fixtures" / f"{stem}.gguf"
    with np.load(path.with_suffix(".npz")) as arrays:
        for length, mode in ((48, "token by token"), (200, "chunks")):
            found = compare(loaded(path, kv_dtype), arrays, length, mode)  # type: ignore[arg-type]
            assert found.is_near(TOLERANCES[kv_dtype]), (length, mode, found)
            assert found.max_abs > TOLERANCES["f32"], "the rows were not rounded at all"


def test_a_prefill_after_a_decode_is_refused(shared_reference: Path) -> None:
    reading = loaded(shared_reference / "fixtures" / "gemma3-tiny-f32.gguf", "f32").reading()
    reading.prefill([2, 5, 6])
    reading.decode(7)
    with pytest.raises(RowError, match="found a prefill"):
        reading.prefill([8])


@pytest.mark.real
def test_the_real_model_computes_the_recorded_logits_and_text(
    shared_reference: Path, real_model: Path
) -> None:
    text = (shared_reference / "fixtures" / "gemma3-270m-outputs.json").read_text(encoding="utf-8")
    record = json.loads(text)
    _, layout, model = load_direct(real_model, RuntimeConfig(model="", kv_dtype="f32"))
    for index in REAL_RUNS:
        run = record["runs"][index]
        found = compare_real(model, run, record["probe_ids"], layout.chunk_tokens)
        assert found.is_within(REAL_TOLERANCES["f32"]), (run["n"], found)
