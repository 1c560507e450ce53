"""The code of ``docs/testing.md``, and the example service, as a reader would run them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import millpond.runtime.testing as harness
import pytest
from millpond.runtime.testing import FakeRuntime
from millpond.runtime.testing.world_run import WorldRun
from pytest import Pytester

LOADED = (FakeRuntime, WorldRun)  # runs in this process forget their modules; numpy loads once
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PLUGIN = "millpond.runtime.testing.plugin"
IS_INSTALLED = any(one.value == PLUGIN for one in entry_points(group="pytest11"))
WITH_PLUGIN = () if IS_INSTALLED else ("-p", PLUGIN)


def test_the_pages_code_runs_in_real_and_in_virtual_time(pytester: Pytester) -> None:
    real = [block for block in BLOCKS if "def anyio_backend" not in block]
    assert len(real) == len(BLOCKS) - 1 and len(real) > 6
    pytester.makepyfile(test_real="\n\n".join(real), test_virtual="\n\n".join(BLOCKS))
    done = pytester.runpytest_inprocess("-p", "no:trio", "-q", "--strict-markers", *WITH_PLUGIN)
    tests = sum(block.count("async def test_") for block in real)
    worlds = 3
    done.assert_outcomes(passed=2 * tests + worlds + 2 * (tests + 1) + worlds)


def test_every_stable_name_is_on_the_page_and_there() -> None:
    section = PAGE.split("\n## Names that stay\n", 1)[1]
    for name in harness.__all__:
        assert f"`{name}`" in section
        assert getattr(harness, name) is not None
    with pytest.raises(AttributeError):
        harness.no_such_name  # noqa: B018


def test_every_fault_is_in_the_pages_table() -> None:
    functions = [
        name
        for name, value in vars(harness.faults).items()
        if inspect.isfunction(value) and value.__annotations__.get("return") == "Fault"
    ]
    assert len(functions) >= 11
    assert [name for name in functions if f"`{name}" not in PAGE] == []


def test_the_examples_tests_pass_and_catch_a_service_that_forgets_to_cancel() -> None:
    program = (
        "import sys; from pathlib import Path; from example import check_example\n"
        "check_example(Path(sys.executable), *sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *WITH_PLUGIN, "-p", "no:trio"],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a service that forgets to cancel is caught" in done.stdout
