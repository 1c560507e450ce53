"""Everything that must hold before a change is good: lint, types, the wheel, the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from environment import ROOT, SetupFailed, base_extras, chat_model, demo_model, prepare, tell
from example import ExampleFailed, check_example

MUST_SHIP = (
    "millpond/py.typed",
    "millpond/actors/engine.py",
    "millpond/codecs/messages.py",
    "millpond/runtime/api.py",
    "millpond/runtime/kv/layout.py",
    "millpond/runtime/testing/__init__.py",
    "millpond/runtime/testing/fake_runtime.py",
    "millpond/runtime/testing/plugin.py",
)


def main(arguments: list[str]) -> int:
    """Run the script; return its exit code.  The last line is pytest's, if it came that far."""
    try:
        python = prepare([*base_extras(), "test"])
        demo_model(python)
        _try_chat_model(python)
        _step("lint and types", [str(ROOT / "scripts" / "check")], python)
        _check_wheel(python)
    except (SetupFailed, ExampleFailed) as error:
        tell(f"test: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    tell("tests")
    pytest = [str(python), "-P", "-m", "pytest", "-m", "not soak", *arguments]
    return subprocess.run(pytest, cwd=ROOT, check=False).returncode


def _try_chat_model(python: Path) -> None:
    """It is a download that few tests need: without it they skip."""
    try:
        chat_model(python)
    except SetupFailed as error:
        tell(f"test: going on without the chat model: {error}")


def _step(name: str, command: list[str], python: Path) -> None:
    tell(name)
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SetupFailed(f"{name}: exit code {done.returncode}")


def _check_wheel(python: Path) -> None:
    """Build the wheel and look for what it must hold: it is made through links."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _step("the wheel", [*pip, "wheel", ".", "--no-deps", "--wheel-dir", folder], python)
        (wheel,) = Path(folder).glob("millpond-*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        missing = [name for name in MUST_SHIP if name not in names]
        if missing:
            raise SetupFailed(f"the wheel lacks {', '.join(missing)}")
        _check_installed(wheel)


def _check_installed(wheel: Path) -> None:
    """The example service's tests, with nothing of the checkout: an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _step("the wheel, installed", [*pip, "install", f"{wheel}[example]"], python)
        tell("the example service")
        check_example(python)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
