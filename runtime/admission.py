"""``WaitingRequests``: in which order requests get a live cache.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    priority: int
    passed_over: int = 0


class WaitingRequests:
    """The higher priority goes first, then who came first.

    Who was passed over ``bypass_max`` times goes before all that came later, so a request begins
    after at most ``bypass_max`` that came later, whatever their priority.
    """

    def __init__(self, bypass_max: int) -> None:
        self._bypass_max = bypass_max
        # mutable state, changed only in add, remove and take
        self._places: OrderedDict[int, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, request_id: int, priority: int) -> None:
        """Put a request at the end of its priority."""
        self._places[request_id] = _Place(priority)

    def remove(self, request_id: int) -> bool:
        """Take a request out; False if it did not wait."""
        return self._places.pop(request_id, None) is not None

    def first(self) -> int | None:
        """Return whose turn it is, None if nobody waits."""
        best: int | None = None
        for request_id, place in self._places.items():
            if place.passed_over >= self._bypass_max:
                return request_id
            if best is None or place.priority > self._places[best].priority:
                best = request_id
        return best

    def take(self, request_id: int) -> None:
        """That request begins; those before it were passed over."""
        for other, place in self._places.items():
            if other == request_id:
                break
            place.passed_over += 1
        del self._places[request_id]
