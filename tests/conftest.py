"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from millpond.runtime.blas import preload

preload(threads=1)  # before any test module imports MLX, which binds the BLAS that it finds


@pytest.fixture(scope="session")
def shared_reference() -> Path:
    """Folder of the reference fixtures beside the checkout; skips where there is none."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip(f"no reference fixtures at {folder}")
    return folder
