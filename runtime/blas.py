"""A fast float32 BLAS under MLX's CPU wheel on Linux, from the ``fast-cpu`` extra.

The wheel links a reference BLAS of a few GFLOPS.  Its symbols are bound lazily, so a library that
is loaded globally before ``import mlx.core`` serves them instead.  ``scipy-openblas32`` carries an
OpenBLAS whose symbols have a prefix; ``patchelf`` makes a copy without it, once, in the user's
cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What libmlx needs of BLAS and LAPACK; source: its dynamic symbol table.
_BLAS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "cheevd_")
_LAPACK = {
    "s": ("geev", "geqrf", "gesdd", "getrf", "getri", "orgqr", "potrf", "syevd", "trtri"),
    "d": ("geev", "geqrf", "gesdd", "getrf", "getri", "orgqr", "potrf", "syevd", "trtri"),
    "c": ("geev", "gesdd"),
}
_PATCH_S = 60.0


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS in use: part of the numerics identity.

    name     ``openblas``, or ``bundled`` for the one that MLX came with
    version  of the library and the kernels it chose for this processor, or empty
    threads  that a product uses, as the library says
    problem  why the fast one is not used; empty if it is, or was not asked for
    """

    name: str
    version: str
    threads: int
    problem: str = ""


def preload(threads: int) -> Blas:
    """Load the fast BLAS for this process, with that many threads; before MLX is imported.

    Never raises for a missing or broken extra: MLX then uses what it came with, and ``problem``
    says why.  Any thread; call it once.
    """
    if sys.platform != "linux":
        return Blas("bundled", "", 1)
    if "mlx.core" in sys.modules and _loaded() is None:
        return Blas("bundled", "", 1, "MLX was imported before its BLAS could be chosen")
    try:
        import scipy_openblas32
    except ImportError:
        return Blas("bundled", "", 1, "the fast-cpu extra is not installed")
    try:
        # The package has loaded its own copy, globally; without DEEPBIND ours would call into it,
        # and the count of threads would be set there and not here.
        mode = ctypes.RTLD_GLOBAL | os.RTLD_DEEPBIND
        library = ctypes.CDLL(str(_renamed(scipy_openblas32)), mode=mode)
    except (OSError, subprocess.SubprocessError) as error:
        return Blas("bundled", "", 1, f"the fast BLAS could not be loaded: {error}")
    library.scipy_openblas_set_num_threads(threads)
    _LOADED.append(library)
    library.scipy_openblas_get_corename.restype = ctypes.c_char_p
    core = (library.scipy_openblas_get_corename() or b"").decode(errors="replace")
    version = f"{scipy_openblas32.__version__} {core}".strip()
    return Blas("openblas", version, library.scipy_openblas_get_num_threads())


# The library stays loaded for the life of the process; a second preload finds it here.
_LOADED: list[ctypes.CDLL] = []


def _loaded() -> ctypes.CDLL | None:
    return _LOADED[0] if _LOADED else None


def _renamed(package: object) -> Path:
    """Return a copy of the library whose symbols have their plain names; make it if need be."""
    folder = Path(package.get_lib_dir())  # type: ignore[attr-defined]
    source = folder / "libscipy_openblas.so"
    status = source.stat()
    key = f"{source}|{status.st_mtime_ns}|{status.st_size}".encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond"
    target = cache / f"openblas-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    names = [*_BLAS, *(f"{kind}{name}_" for kind, all_ in _LAPACK.items() for name in all_)]
    table = cache / f"openblas-{os.getpid()}.map"
    fresh = cache / f"openblas-{os.getpid()}.so"
    try:
        table.write_text("".join(f"scipy_{name} {name}\n" for name in names))
        beside = Path(sys.executable).parent / "patchelf"
        command = [str(beside) if beside.exists() else "patchelf"]
        command += ["--rename-dynamic-symbols", str(table), "--set-soname", target.name]
        command += ["--output", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_PATCH_S)
        fresh.replace(target)
    finally:
        table.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)
    return target
