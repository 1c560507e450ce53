"""The harness: what tests of millpond, and of services that embed it, are built from.

``docs/testing.md`` shows how.  The names below are stable; the files beside them are not.
Importing this package imports nothing else: the names are looked up when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.runtime.testing.fake_model import FakeModel
    from millpond.runtime.testing.fake_runtime import FAKE_CONFIG, FakeRuntime
    from millpond.runtime.testing.faults import Fault
    from millpond.runtime.testing.leaks import Leaked
    from millpond.runtime.testing.schedule import run_seeded, virtual_backends
    from millpond.runtime.testing.sim_device import SimDevice
    from millpond.runtime.testing.sim_disk import SimDisk
    from millpond.runtime.testing.sim_faults import SimCrash
    from millpond.runtime.testing.world import World, WorldResult, run_world
    from millpond.runtime.testing.world_draw import draw_plan
    from millpond.runtime.testing.world_plan import WorldPlan

_HOMES = {
    "FAKE_CONFIG": "fake_runtime",
    "FakeModel": "fake_model",
    "FakeRuntime": "fake_runtime",
    "Fault": "faults",
    "Leaked": "leaks",
    "SimCrash": "sim_faults",
    "SimDevice": "sim_device",
    "SimDisk": "sim_disk",
    "World": "world",
    "WorldPlan": "world_plan",
    "WorldResult": "world",
    "draw_plan": "world_draw",
    "run_seeded": "schedule",
    "run_world": "world",
    "virtual_backends": "schedule",
}

__all__ = [
    "FAKE_CONFIG",
    "FakeModel",
    "FakeRuntime",
    "Fault",
    "Leaked",
    "SimCrash",
    "SimDevice",
    "SimDisk",
    "World",
    "WorldPlan",
    "WorldResult",
    "draw_plan",
    "faults",
    "run_seeded",
    "run_world",
    "virtual_backends",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "faults":
        return importlib.import_module(f"{__name__}.faults")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
