"""What a test left behind: requests that nobody ended, slots, leases and caches that stayed out."""

from __future__ import annotations

from collections.abc import Mapping

from anyio import move_on_after, sleep
from millpond.actors.gateway import Gateway
from millpond.runtime.assembly import Built
from millpond.runtime.testing.fake_model import FakeModel
from millpond.runtime.testing.homecoming import check_root
from millpond.runtime.testing.invariants import Judge, Violation

SHOWN_CHARS = 40  # of a prompt
LOOK_S = 0.01
ADVICE = (
    "Whoever asked neither read the answer to its end nor left the block of `runtime.stream(...)`: "
    "leave it when the client is gone."
)


class Leaked(AssertionError):
    """A test ended, and something of its runtime was still in use."""


async def unread_requests(
    gateway: Gateway, prompts: Mapping[int, str], settle_s: float
) -> list[str]:
    """Return a line for each request that still runs for a reader ``settle_s`` from now.

    The model must be held meanwhile, so that none ends by itself.
    """
    with move_on_after(settle_s):
        while gateway.unread():  # noqa: ASYNC110, nobody is told when a reader leaves
            await sleep(LOOK_S)
    return [
        f"request {number} was still running: prompt {_short(prompts.get(number, ''))}. {ADVICE}"
        for number in gateway.unread()
    ]


def left_behind(built: Built, model: FakeModel, is_hurt: bool) -> list[str]:
    """Return a line for whatever did not come home, after the house closed in order.

    is_hurt  a thread broke: slots that it may still touch are lost, and that is right
    """
    found = []
    for pool in built.pools:
        figures = pool.statistics()
        if figures.lent or (figures.lost and not is_hurt):
            found.append(f"{pool!r}: {figures.lent} slots are lent, {figures.lost} lost")
    memory = built.store.statistics().memory
    if memory.claims:
        found.append(f"the store still counts {memory.claims} live caches of running requests")
    if model.left_behind:
        found.append(f"live caches of requests {list(model.left_behind)} were never freed")
    if built.shared.root is not None:
        try:
            check_root(Judge(), built.shared.root)
        except Violation as violation:
            found.append(str(violation))
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…")
