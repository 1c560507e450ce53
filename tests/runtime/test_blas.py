"""The BLAS under MLX: chosen once, and with the count of threads that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from millpond.runtime.blas import preload
found = [preload(int(count)) for count in sys.argv[1:]]
import mlx.core as mx
found.append(preload(int(sys.argv[-1])))
a = mx.random.normal((256, 256))
mx.eval(a @ a)
print(json.dumps([[blas.name, blas.threads, blas.problem] for blas in found]))
"""


def preloaded(*counts: int) -> list[list[object]]:
    script = [sys.executable, "-c", SCRIPT, *map(str, counts)]
    done = subprocess.run(script, capture_output=True, check=True)
    found: list[list[object]] = json.loads(done.stdout)
    if found[0][0] == "bundled":
        pytest.skip(f"no fast BLAS here: {found[0][2] or sys.platform}")
    return found


@pytest.mark.parametrize("count", [1, min(2, os.cpu_count() or 1)])
def test_the_library_under_mlx_uses_as_many_threads_as_asked(count: int) -> None:
    """The setting once went to the package's own copy of the library.

    Products used every core, decoding was ten times slower beside another busy process, and the
    numerics identity named a count of threads that was not in use.
    """
    assert preloaded(count) == [["openblas", count, ""]] * 2


def test_the_count_of_threads_can_change() -> None:
    assert [threads for _, threads, _ in preloaded(2, 1)] == [min(2, os.cpu_count() or 1), 1, 1]
