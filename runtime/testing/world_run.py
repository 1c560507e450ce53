"""``WorldRun``: one seed's world, for tests that run worlds and say how to run one again."""

from __future__ import annotations

import msgspec
from millpond.runtime.testing.faults import Fault, added_to
from millpond.runtime.testing.world import WorldResult, run_world
from millpond.runtime.testing.world_draw import draw_plan
from millpond.runtime.testing.world_plan import WorldPlan


class WorldViolated(AssertionError):
    """A world broke one of its rules; the message says which, of which seed, and how to see it."""


class WorldRun:
    """A drawn world with a test's own faults in its first process.

    seed   it was drawn from
    plan   plain data; change it with ``msgspec.structs.replace``
    again  command that runs this test with this seed alone
    """

    def __init__(self, seed: int, faults: tuple[Fault, ...] = (), again: str = "") -> None:
        self.seed, self.again = seed, again
        plan = draw_plan(seed)
        first, *others = plan.processes
        processes = (added_to(first, faults), *others)
        self.plan: WorldPlan = msgspec.structs.replace(plan, processes=processes)

    def __repr__(self) -> str:
        return f"<WorldRun seed {self.seed}>"

    def run(self, plan: WorldPlan | None = None) -> WorldResult:
        """Run the world, or the given one; raises WorldViolated with the end of its trace."""
        lines: list[str] = []
        result = run_world(plan or self.plan, lines)
        if result.violation is not None:
            shown = "\n".join(lines[-TRACE_LINES:])
            raise WorldViolated(
                f"seed {self.seed}: {result.violation}\nthe last of its trace:\n{shown}\n"
                f"again: {self.again or f'run_world(draw_plan({self.seed}))'}"
            )
        return result


TRACE_LINES = 20
