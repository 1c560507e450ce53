"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest
from millpond.runtime.testing.fake_runtime import FakeRuntime
from millpond.runtime.testing.world_run import WorldRun
from pytest import Pytester, RunResult

LOADED = (FakeRuntime, WorldRun)  # runs in this process forget their modules; numpy loads once
PLUGIN = "millpond.runtime.testing.plugin"
HEAD = """
import anyio
import pytest
from millpond.runtime import SamplingParams
from millpond.runtime.testing import faults

SHORT = SamplingParams(max_tokens=2)
"""


def run(pytester: Pytester, test: str, *arguments: str) -> RunResult:
    """Run a file of tests with the plugin, as an installed millpond brings it."""
    pytester.makepyfile(HEAD + test)
    is_installed = any(one.value == PLUGIN for one in entry_points(group="pytest11"))
    plugin = () if is_installed else ("-p", PLUGIN)
    return pytester.runpytest_inprocess("-p", "no:trio", "-q", *plugin, *arguments)


def test_a_service_author_gets_a_runtime_on_both_backends(pytester: Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.anyio
async def test_it(fake_runtime):
    async with fake_runtime.open() as runtime:
        assert (await runtime.generate("Hi")).finish_reason == "length"
        await runtime.generate("Hi")
""",
    )
    done.assert_outcomes(passed=2)
    done.stdout.no_fnmatch_line("*warning*")


LEAK = """
@pytest.mark.anyio
async def test_it(fake_runtime):
    async def forgetful():
        async with runtime.stream("Hi", SamplingParams(max_tokens=4000)) as tokens:
            with pytest.raises(Exception):
                await tokens.result()

    fake_runtime.settle_s = 0.05
    fake_runtime.hold(after_tokens=1)
    async with anyio.create_task_group() as service, fake_runtime.open() as runtime:
        service.start_soon(forgetful)
        await fake_runtime.wait_held()
"""


def test_a_request_that_outlives_its_test_fails_it_with_a_clear_message(
    pytester: Pytester,
) -> None:
    done = run(pytester, LEAK, "-k", "asyncio")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*Leaked: request 0 was still running: prompt 'Hi'*leave it when the client is gone.",
            "*seed 0; again: pytest '*test_a_request_*.py::test_it[[]asyncio[]]' --millpond-seed 0",
        ]
    )


def test_a_leak_of_a_fixture_that_closes_later_is_an_error(pytester: Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.fixture
async def runtime(fake_runtime):
    async with fake_runtime.open() as runtime:
        yield runtime

@pytest.fixture
async def service():
    async with anyio.create_task_group() as tasks:
        yield tasks

@pytest.mark.anyio
async def test_it(service, runtime, fake_runtime):
    async def forgetful():
        with pytest.raises(Exception):
            await runtime.generate("Hi", SamplingParams(max_tokens=4000))
    fake_runtime.settle_s = 0.05
    fake_runtime.hold(1)
    service.start_soon(forgetful)
    await fake_runtime.wait_held()
""",
        "-k",
        "trio",
    )
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*Leaked: request 0 was still running*", "*seed 0; again: pytest*"])


def test_a_failed_test_is_not_blamed_for_leaks_too(pytester: Pytester) -> None:
    test = LEAK + "        assert 1 == 2\n"
    done = run(pytester, test, "-k", "trio")
    done.assert_outcomes(failed=1)
    done.stdout.no_fnmatch_line("*Leaked*")


def test_faults_of_marks_hit_the_first_process(pytester: Pytester) -> None:
    done = run(
        pytester,
        """
pytestmark = [pytest.mark.anyio, pytest.mark.millpond_faults(faults.disk_slow("write", nth=2))]

@pytest.mark.millpond_faults(faults.process_dies(operation=57))
async def test_it(fake_runtime):
    async with fake_runtime.open() as runtime:
        for number in range(20):
            await runtime.generate(f"{number} a prompt of more than sixteen tokens", SHORT)
            await runtime.drain()
            assert fake_runtime.injected() == {"slow write": 1}
    assert fake_runtime.crashed
    async with fake_runtime.open() as runtime:
        await runtime.generate("a prompt of more than sixteen tokens", SHORT)
        assert fake_runtime.injected() == {}
    assert not fake_runtime.crashed
""",
    )
    done.assert_outcomes(passed=2)


def test_a_mark_that_holds_no_fault_is_an_error(pytester: Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.anyio
@pytest.mark.millpond_faults("disk full")
async def test_it(fake_runtime):
    async with fake_runtime.open():
        pass
""",
        "-k",
        "trio",
    )
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*TypeError: found 'disk full', expected a fault*"])


SEEDED = """
@pytest.mark.millpond_seeds
def test_some(millpond_seed): pass

@pytest.mark.millpond_seeds(3, 17)
def test_these(fake_runtime, millpond_seed):
    assert fake_runtime.seed == millpond_seed in (3, 17, 5)

def test_one(fake_runtime):
    assert fake_runtime.seed in (0, 5)
"""


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [((), 13), (("--millpond-seeds", "4"), 7), (("--millpond-seed", "5"), 3)],
)
def test_seeds_are_those_of_mark_and_options(
    pytester: Pytester, arguments: tuple[str, ...], passed: int
) -> None:
    run(pytester, SEEDED, *arguments).assert_outcomes(passed=passed)


def test_worlds_run_by_seed(pytester: Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.millpond_faults(faults.disk_fails("write", "ENOSPC", times=2))
def test_it(millpond_world):
    result = millpond_world.run()
    assert result.outcomes["answered"]
""",
        "--millpond-seeds",
        "3",
        "-vv",
    )
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["*::test_it[[]seed2[]]*"])


def test_a_world_that_breaks_a_rule_says_its_seed_and_how_to_see_it_again(
    pytester: Pytester,
) -> None:
    test = """
import millpond.runtime.testing.world as world

def test_it(millpond_world, monkeypatch):
    def broken(self, *ends):
        raise ArithmeticError("planted")
    monkeypatch.setattr(world.SimProcess, "open_root", broken)
    millpond_world.run()
"""
    done = run(pytester, test, "--millpond-seed", "17")
    done.assert_outcomes(failed=1)
    name = "test_a_world_that_breaks_a_rule_says_its_seed_and_how_to_see_it_again.py"
    again = f"again: pytest '{name}::test_it[[]seed17[]]' --millpond-seed 17"
    done.stdout.fnmatch_lines(["*WorldViolated: seed 17: *planted*", f"*{again}"])


def test_the_marks_are_declared_and_the_options_explained(pytester: Pytester) -> None:
    run(pytester, "def test_it(): pass", "--strict-markers", "--markers").stdout.fnmatch_lines(
        ["@pytest.mark.millpond_faults(*", "@pytest.mark.millpond_seeds(*"]
    )
    run(pytester, "", "--help").stdout.fnmatch_lines(["*--millpond-seeds=N*"])


def test_a_run_without_our_fixtures_imports_nothing_of_ours(
    pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
import sys

def test_it():
    ours = [name for name in sys.modules if name.startswith("millpond.")]
    assert sorted(ours) == [
        "millpond.runtime", "millpond.runtime.testing", "millpond.runtime.testing.plugin"
    ]
    assert "trio" not in sys.modules and "numpy" not in sys.modules
"""
    )
    done = pytester.run(sys.executable, "-P", "-m", "pytest", "-q", "-p", PLUGIN)
    assert done.ret == 0, done.stdout.str()
