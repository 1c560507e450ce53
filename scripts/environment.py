"""The virtual environment of a checkout, and the demo model in it.  Standard library only."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "gemma3-270m.gguf"
CHAT_MODEL = ROOT / "models" / "smollm2-135m-instruct.gguf"
TERMS = "the demo model is Gemma 3 270M; the Gemma Terms of Use apply (ai.google.dev/gemma/terms)"
# Succeeds if this environment has a millpond, and it is the one of this checkout.
_IS_OURS = (
    "import pathlib, sys, millpond;"
    "sys.exit(not pathlib.Path(millpond.__file__).samefile(sys.argv[1]))"
)


class SetupFailed(Exception):
    """Something outside of millpond did not work; the message says what."""


def tell(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def prepare(extras: Sequence[str], folder: Path = ROOT / ".venv") -> Path:
    """Return the Python of a virtual environment that has this checkout and these extras.

    What is there already is reused, unless ``pyproject.toml`` changed.  Raises SetupFailed.
    """
    python = folder / "bin" / "python"
    wanted = {"pyproject": _digest(ROOT / "pyproject.toml"), "extras": sorted(extras)}
    note = folder / "millpond-installed.json"
    found = _read(note) if _is_ours(python) else {}
    if found.get("pyproject") == wanted["pyproject"]:
        wanted["extras"] = sorted({*found.get("extras", ()), *extras})
        if found == wanted:
            return python
    if not _runs(python):
        tell(f"making a virtual environment in {folder}")
        options = ["--clear"] if folder.exists() else []
        _run([sys.executable, "-m", "venv", *options, str(folder)], "python -m venv")
    chosen = ",".join(wanted["extras"])
    tell(f"installing millpond[{chosen}]: a minute or so, most of it the download")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--editable", f".[{chosen}]"], "pip install")
    note.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def base_extras(device: str = "cpu") -> list[str]:
    """Return the extras that a device needs here, and the demo model."""
    if sys.platform == "darwin":
        return ["demo"]  # plain MLX is the Metal build
    return ["cuda", "demo"] if device == "cuda" else ["cpu", "demo", "fast-cpu"]


def demo_model(python: Path) -> Path:
    """Return the path of the demo model, assembled and verified.  Raises SetupFailed."""
    tell(TERMS)
    _run([str(python), str(ROOT / "scripts" / "assemble_model.py"), str(MODEL)], "assemble_model")
    return MODEL


def chat_model(python: Path) -> Path:
    """Return the path of SmolLM2 135M Instruct, downloaded and verified.  Raises SetupFailed."""
    _run([str(python), str(ROOT / "scripts" / "chat_model.py"), str(CHAT_MODEL)], "chat_model")
    return CHAT_MODEL


def _is_ours(python: Path) -> bool:
    package = ROOT / ".src" / "millpond" / "__init__.py"
    return _runs(python, "-P", "-c", _IS_OURS, str(package))


def _runs(python: Path, *arguments: str) -> bool:
    try:
        found = subprocess.run(
            [python, *(arguments or ("-m", "pip", "--version"))], capture_output=True, check=False
        )
    except OSError:
        return False
    return found.returncode == 0


def _run(command: Sequence[str], name: str) -> None:
    """Run a command from the checkout; what it prints is shown if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        tell(done.stdout.decode(errors="replace").rstrip())
        raise SetupFailed(f"{name} failed with exit code {done.returncode}; its output is above")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> dict[str, list[str] | str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
