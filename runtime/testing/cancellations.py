"""Which ``await`` of which actor was the place of a cancellation.

A place is an ``await``, ``async for`` or ``async with`` in a file under ``actors/``.  It counts as
covered when a cancellation was delivered to a task that waited there, in the actor's own frame or
in what that awaited; a task group that waits for its tasks is cancelled with them, and is such a
place.  The ends of arrows never wait when they are entered or left, so an ``async with`` over
nothing else is no place.  Works on trio, where the scheduler can be watched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import millpond.actors

_AWAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where an actor waits.

    file, line  of its beginning; ``what`` is that line's text
    path, last  the whole path, and the last line that belongs to it
    """

    file: str
    line: int
    what: str
    path: str
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"

    def holds(self, task: Any) -> bool:
        """True iff a trio task waits here."""
        return any(
            self.line <= line <= self.last and frame.f_code.co_filename == self.path
            for frame, line in task.iter_await_frames()
        )


class CancellationCoverage:
    """Collects places over many worlds; ``probe`` goes to ``run_world``."""

    def __init__(self) -> None:
        self._places = actor_places()
        self._paths = frozenset(place.path for place in self._places)
        # mutable state, changed only in probe and merge
        self.seen: set[tuple[str, int]] = set()

    def probe(self, task: Any) -> None:
        """Look at a waiting task to which a cancellation is delivered."""
        for frame, line in task.iter_await_frames():
            if frame.f_code.co_filename in self._paths:
                self.seen.add((frame.f_code.co_filename, line))

    def merge(self, seen: set[tuple[str, int]]) -> None:
        """Add what another process saw."""
        self.seen |= seen

    def covered(self) -> tuple[Place, ...]:
        """Return the places that were covered."""
        return tuple(place for place in self._places if self._is_covered(place))

    def missing(self) -> tuple[Place, ...]:
        """Return the places that were not."""
        return tuple(place for place in self._places if not self._is_covered(place))

    def _is_covered(self, place: Place) -> bool:
        lines = range(place.line, place.last + 1)
        return any((place.path, line) in self.seen for line in lines)


@cache
def actor_places() -> tuple[Place, ...]:
    """Return every place of the actors of a simulated house, sorted.

    The loader reads a real file, and the server is outside of the house: they have their own tests.
    """
    found: list[Place] = []
    for folder in millpond.actors.__path__:
        for path in Path(folder).glob("*.py"):
            if not path.name.startswith("loader"):
                found.extend(_places_of(path))
    return tuple(sorted(found))


def _places_of(path: Path) -> Iterator[Place]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _AWAITS) and not _only_ends(node):
            last = node.end_lineno if isinstance(node, ast.Await) else node.body[0].lineno - 1
            assert last is not None
            what = lines[node.lineno - 1].strip()
            yield Place(path.name, node.lineno, what, str(path), max(last, node.lineno))


def _only_ends(node: ast.AST) -> bool:
    return isinstance(node, ast.AsyncWith) and all(
        isinstance(item.context_expr, ast.Name) for item in node.items
    )
