"""Products with few rows: in pieces, on several cores, the same to the bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from millpond.runtime.families import linear


@pytest.mark.parametrize("width", [4096, 4099, 5000, 640])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_product_on_several_cores_equals_that_on_one(
    monkeypatch: pytest.MonkeyPatch, width: int, count: int
) -> None:
    generator = np.random.default_rng(width)
    weight = mx.array(generator.standard_normal((width, 640)).astype(np.float32))
    x = mx.array(generator.standard_normal((count, 640)).astype(np.float32))
    found = []
    for cores in (1, 2, 3, 4):
        monkeypatch.setattr(linear, "_cores", lambda cores=cores: cores)
        found.append(np.array(linear.few_rows_product(x, weight)))
    assert found[0].shape == (count, width)
    np.testing.assert_allclose(found[0], np.array(x) @ np.array(weight).T, atol=2e-3)
    for other in found[1:]:
        assert other.tobytes() == found[0].tobytes()
