"""Compare a loaded model with logits that other software recorded; formats: the fixtures' README.

Logits of two positions or more are compared by value.  Where the best id differs from the recorded
one, ours must rank both closer than twice the tolerance: only then can rounding have swapped them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from millpond.runtime.testing.direct import chunks
from millpond.runtime.testing.reading import DirectModel, Logits, Reading

Mode = Literal["one pass", "chunks", "token by token"]
MODES: tuple[Mode, ...] = ("one pass", "chunks", "token by token")
ODD_CHUNK_TOKENS = 7  # divides no window, block or length of the fixtures
# By the dtype of K and V: float32 throughout; the README's for float16; bfloat16 has three bits
# fewer, and its differences are measured to be up to ten times those of float16.
TOLERANCES = {"f32": 1e-3, "f16": 1e-1, "bf16": 4e-1}
# The real model: measured 1e-4, 6e-3 and 4e-2.
REAL_TOLERANCES, REAL_MARGIN = {"f32": 0.02, "f16": 0.02, "bf16": 0.1}, 0.05


@dataclass(frozen=True, slots=True)
class Agreement:
    """One sequence against its recorded logits.

    max_abs, median_abs  difference over the recorded positions
    argmax_equal         positions whose best id is the recorded one, of ``tokens``
    swap_max             our best logit above that of the recorded best id, at the worst position
    """

    max_abs: float
    median_abs: float
    argmax_equal: int
    tokens: int
    swap_max: float

    def is_within(self, tolerance: float) -> bool:
        """True if no logit is further away, and the best ids differ by rounding at most."""
        return self.max_abs <= tolerance and self.swap_max <= 2 * tolerance

    def is_near(self, tolerance: float) -> bool:
        """The same for a mixture of experts in half precision: one flipped expert moves a token.

        The median is within the tolerance, and 97 of 100 best ids are the recorded ones.
        """
        return self.median_abs <= tolerance and self.argmax_equal >= 0.97 * self.tokens


def recorded_lengths(arrays: Mapping[str, Any]) -> list[int]:
    """Return the lengths of the sequences that an ``.npz`` of the fixtures holds, ascending."""
    return sorted(int(name[7:]) for name in arrays if name.startswith("tokens_"))


def compare(model: DirectModel, arrays: Mapping[str, Any], length: int, mode: Mode) -> Agreement:
    """Run the recorded sequence of a length and compare every logit that was recorded."""
    ids: list[int] = arrays[f"tokens_{length}"].tolist()
    ours = np.concatenate(list(_logits(model.reading(), ids, mode)))
    recorded, best = arrays[f"logits_{length}"], arrays[f"argmax_{length}"]
    differences = np.abs(ours[arrays[f"positions_{length}"]] - recorded)
    above = ours.max(axis=1) - ours[np.arange(length), best]
    return Agreement(
        max_abs=float(differences.max()),
        median_abs=float(np.median(differences)),
        argmax_equal=int((ours.argmax(axis=1) == best).sum()),
        tokens=length,
        swap_max=float(above.max()),
    )


def _logits(reading: Reading, ids: list[int], mode: Mode) -> Iterator[Logits]:
    if mode == "token by token":
        yield reading.prefill(ids[:1])
        for token_id in ids[1:]:
            yield reading.decode(token_id)[None]
        return
    step = len(ids) if mode == "one pass" else ODD_CHUNK_TOKENS
    for chunk in chunks(len(ids), step):
        yield reading.prefill(ids[chunk.start : chunk.stop])


@dataclass(frozen=True, slots=True)
class RealAgreement:
    """The real model after one prompt, against a recorded run.

    top_abs, probe_abs  difference over the five best logits, and over the probe ids
    greedy_equal        steps of ``greedy_tokens`` whose best id is the recorded one
    margin_max          largest recorded margin of a step where it is not; 0 if there is none
    """

    top_abs: float
    probe_abs: float
    greedy_equal: int
    greedy_tokens: int
    margin_max: float

    def is_within(self, tolerance: float) -> bool:
        """True if logits are within the tolerance and only near ties were decided otherwise."""
        return max(self.top_abs, self.probe_abs) <= tolerance and self.margin_max <= REAL_MARGIN


def compare_real(
    model: DirectModel, run: Mapping[str, Any], probe_ids: list[int], chunk_tokens: int
) -> RealAgreement:
    """Prefill a run's ids on the grid, then decode along its recorded greedy ids.

    run  an entry of ``runs`` of ``gemma3-270m-outputs.json``; float32 results are compared
    """
    ids, expected, reading = run["ids"], run["transformers_f32"], model.reading()
    for chunk in chunks(len(ids), chunk_tokens):
        rows = [len(chunk) - 1] if chunk.stop == len(ids) else []
        found = reading.prefill(ids[chunk.start : chunk.stop], rows)
    logits = found[0]
    top = np.abs(logits[expected["top_ids"]] - np.array(expected["top_logits"]))
    probe = np.abs(logits[probe_ids] - np.array(expected["probe_logits"]))
    others = []
    steps = list(zip(expected["greedy_ids"], expected["greedy_margin"], strict=True))
    for token_id, margin in steps:
        if int(logits.argmax()) != token_id:
            others.append(margin)
        logits = reading.decode(token_id)  # the recorded one: every step is compared
    return RealAgreement(
        top_abs=float(top.max()),
        probe_abs=float(probe.max()),
        greedy_equal=len(steps) - len(others),
        greedy_tokens=len(steps),
        margin_max=max(others, default=0.0),
    )
