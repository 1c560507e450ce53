"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from millpond.runtime.blas import preload

pytest_plugins = ["pytester"]  # tests of our plugin run pytest
preload(threads=1)  # before any test module imports MLX, which binds the BLAS that it finds


@pytest.fixture(scope="session")
def shared_reference() -> Path:
    """Folder of the reference fixtures beside the checkout; skips where there is none."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip(f"no reference fixtures at {folder}")
    return folder


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Gemma 3 270M, as ``scripts/test`` assembles it; skips where it is not."""
    usual = Path(__file__).resolve().parents[1] / "models" / "gemma3-270m.gguf"
    path = Path(os.environ.get("MILLPOND_TEST_MODEL") or usual)
    if not path.is_file():
        pytest.skip(f"no model at {path}: scripts/test assembles it")
    return path
