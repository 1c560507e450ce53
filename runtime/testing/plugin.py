"""pytest plugin: fixtures ``fake_runtime`` and ``millpond_world``, marks for faults and seeds.

It is loaded in every pytest run where millpond is installed, so it imports nothing of ours before a
fixture is used.  ``docs/testing.md`` shows how to use it.

    --millpond-seeds N   worlds of each test with ``millpond_world``, and of each ``millpond_seeds``
    --millpond-seed N    this one only: what a failure report asks for
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from millpond.runtime.testing.fake_runtime import FakeRuntime
    from millpond.runtime.testing.faults import Fault
    from millpond.runtime.testing.world_run import WorldRun

SEEDS = 10  # a few seconds of worlds
MARKS = (
    "millpond_faults(*faults): trouble of the first process, see millpond.runtime.testing.faults",
    "millpond_seeds(*seeds): run with each of these seeds; none given: --millpond-seeds says",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("millpond")
    group.addoption(
        "--millpond-seeds",
        type=int,
        default=SEEDS,
        metavar="N",
        help=f"seeds 0 to N - 1 for tests that take seeds (default: {SEEDS})",
    )
    group.addoption(
        "--millpond-seed",
        type=int,
        default=None,
        metavar="N",
        help="this seed alone, for every test that takes one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    for line in MARKS:
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test one run for each seed."""
    mark = metafunc.definition.get_closest_marker("millpond_seeds")
    if SEED_FIXTURE not in metafunc.fixturenames:
        return
    if mark is None and "millpond_world" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--millpond-seed")
    seeds = list(mark.args) if mark is not None and mark.args else None
    if chosen is not None:
        seeds = [chosen]
    elif seeds is None:
        seeds = list(range(metafunc.config.getoption("--millpond-seeds")))
    metafunc.parametrize(SEED_FIXTURE, seeds, indirect=True, ids=[f"seed{one}" for one in seeds])


SEED_FIXTURE = "millpond_seed"


@pytest.fixture
def millpond_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; ``--millpond-seed``, else 0, for tests that do not vary it."""
    chosen: int | None = request.config.getoption("--millpond-seed")
    found: int = getattr(request, "param", 0 if chosen is None else chosen)
    return found


@pytest.fixture
def fake_runtime(request: pytest.FixtureRequest, millpond_seed: int) -> Iterator[FakeRuntime]:
    """A ``FakeRuntime``: ``async with fake_runtime.open() as runtime``, on asyncio or trio.

    A test that ends while a request still runs, or that leaves slots or caches behind, fails.
    """
    from millpond.runtime.testing.fake_runtime import FakeRuntime

    fake = FakeRuntime(millpond_seed, _faults_of(request.node))
    yield fake
    if request.node.stash.get(_FAILED, None) is not fake:
        fake.check()  # of runtimes that other fixtures closed after the test


@pytest.fixture
def millpond_world(request: pytest.FixtureRequest, millpond_seed: int) -> WorldRun:
    """A ``WorldRun`` of this run's seed: ``millpond_world.run()`` fails if it breaks a rule."""
    from millpond.runtime.testing.world_run import WorldRun

    return WorldRun(millpond_seed, _faults_of(request.node), _again(request.node, millpond_seed))


_FAILED: pytest.StashKey[object] = pytest.StashKey()  # the fake runtime whose test failed already


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """After a test passed: whatever its runtimes left behind fails it."""
    outcome = yield
    fake = getattr(item, "funcargs", {}).get("fake_runtime")
    if fake is None:
        return
    if outcome.excinfo is not None:
        item.stash[_FAILED] = fake
    elif fake.leaks:
        item.stash[_FAILED] = fake
        lines = "\n".join(fake.leaks)
        outcome.force_exception(pytest.fail.Exception(f"Leaked: {lines}", pytrace=False))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Say the seed of a failure, and how to run it again."""
    outcome = yield
    report = outcome.get_result()
    arguments = getattr(item, "funcargs", {})
    if report.failed and SEED_FIXTURE in arguments:
        seed = arguments[SEED_FIXTURE]
        report.sections.append(("millpond", f"seed {seed}; again: {_again(item, seed)}"))


def _again(item: pytest.Item, seed: int) -> str:
    return f"pytest {shlex.quote(item.nodeid)} --millpond-seed {seed}"


def _faults_of(item: pytest.Item) -> tuple[Fault, ...]:
    """Those of the module first, then of the class, then of the test."""
    marks = reversed(list(item.iter_markers("millpond_faults")))
    return tuple(fault for mark in marks for fault in mark.args)
