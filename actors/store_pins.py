"""The store's pins: prompts whose blocks stay for a time, once their requests have ended.

Invariants

(I1) A prompt is pinned behind the last of its blocks that was offered, by the task that spills.
(I2) A pin that would take too much is refused, counted and logged; the request never fails for it.
"""

from __future__ import annotations

import logging
import math
from functools import partial

from millpond.actors.store_parts import StoreParts
from millpond.codecs.messages import Submit
from millpond.runtime.errors import EngineError
from millpond.runtime.kv.plan import Shelves
from millpond.runtime.kv.root import SpillRoot

_log = logging.getLogger(__name__)


class Pins:
    """Used by the store only, on the event loop."""

    def __init__(self, parts: StoreParts, root: SpillRoot | None, shelves: Shelves | None) -> None:
        self._parts, self._root, self._shelves = parts, root, shelves
        # mutable state, changed only in the methods below
        self._wanted: dict[int, Submit] = {}
        self.done = self.refused = 0
        self.problem = ""

    def want(self, submit: Submit) -> None:
        """A request came."""
        if submit.pin_s is not None and submit.chain:
            self._wanted[submit.request_id] = submit

    def take(self, request_id: int) -> Submit | None:
        """A request has ended: return it if it is to be pinned."""
        return self._wanted.pop(request_id, None)

    async def pin(self, submit: Submit) -> None:
        """Pin every block of a prompt that is on the disk, or let go of them."""
        assert submit.pin_s is not None, "only requests that want a pin"
        root, now = self._root, self._parts.clock()
        problem = "there is no spill root"
        if root is not None and self._shelves is not None:
            with root.guard:
                tips = self._shelves.tips(submit.chain)
            until = math.ceil(root.options.now() + submit.pin_s) if submit.pin_s else 0
            hold = partial(root.hold, tips, until, now)
            try:
                problem = await self._parts.writer.call(hold, self._parts.limits.disk_stall_s)
            except EngineError as error:
                problem = str(error)
                root.turn_off(problem, now)
        self.problem = problem
        if problem:
            self.refused += 1
            _log.warning("a prompt was not pinned: %s", problem)
        else:
            self.done += 1
