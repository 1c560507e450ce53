"""What this machine and this build compute with: the numerics identity.  Pinned thread."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import sys
from pathlib import Path

import numpy as np
from millpond.codecs.fingerprint import NumericsIdentity
from millpond.runtime.blas import Blas, preload
from millpond.runtime.config import RuntimeConfig

_log = logging.getLogger(__name__)
KERNEL_REVISION = 3  # counts changes of our forward pass and caches that change bits


SLOW_BLAS = "the BLAS that MLX brings is used, which is up to 30 times slower"


def compute_problem(numerics: NumericsIdentity, config: RuntimeConfig) -> str:
    """Return why a machine computes slower than it could, ``""`` if it does not."""
    is_slow = numerics.device_kind == "cpu" and numerics.blas_name == "bundled"
    if not (is_slow and config.fast_blas and sys.platform == "linux"):
        return ""
    return f"{SLOW_BLAS}: the fast-cpu extra is missing or could not be loaded"


def numerics_identity(config: RuntimeConfig) -> NumericsIdentity:
    """Choose BLAS, device and dtypes, and name them.  Imports MLX, after the BLAS is in place.

    Defaults: float32 on a CPU, else bfloat16; weights dense.  Logs a warning where a CPU computes
    without the fast BLAS that was asked for, with the reason.
    """
    blas = preload(config.blas_threads) if config.fast_blas else Blas("bundled", "", 1)
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.cpu
    info = mx.device_info()
    if on_cpu and blas.problem:
        _log.warning("%s: %s", SLOW_BLAS, blas.problem)
    return NumericsIdentity(
        device_kind="cpu" if on_cpu else "gpu",
        device_model=_cpu_model() if on_cpu else str(info.get("device_name", "")),
        compute_dtype=config.compute_dtype or ("float32" if on_cpu else "bfloat16"),
        weight_form=config.weight_form or "dense",
        mlx_version=importlib.metadata.version("mlx"),
        blas_name=blas.name,
        blas_version=blas.version,
        blas_threads=blas.threads,
        kernel_revision=KERNEL_REVISION,
        host_kernels=f"numpy {np.__version__}" if on_cpu else "",
    )


def _cpu_model() -> str:
    """Vendor, family, model and stepping, which choose the kernels of a CPU library."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    wanted = ("model name", "cpu family", "model", "stepping")
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in found.items()}
    return " ".join(values[key] for key in wanted if key in values) or platform.machine()
