"""How the blocks under a root divide among the models that wrote them.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond.runtime.kv.index import Shelf


@dataclass(frozen=True, slots=True)
class NamespaceFigures:
    """Blocks of one namespace, which is that of one model or of several files of one name.

    name    first 16 hex digits of the fingerprint: the name of its folder
    blocks  of all its groups
    bytes   estimated from one block of each group; all blocks of a group have about one size
    """

    name: str
    blocks: int
    bytes: int


def by_namespace(shelves: Iterable[Shelf]) -> tuple[NamespaceFigures, ...]:
    """Return the figures of each namespace that has blocks, by name; a few steps for each shelf.

    The folder of a shelf is ``v1/<namespace>/<group>``.
    """
    found: dict[str, tuple[int, int]] = {}
    for shelf in shelves:
        if not shelf.blocks:
            continue
        count, size = len(shelf.blocks), next(iter(shelf.blocks.values())).bytes
        name = shelf.folder.split("/")[1]
        blocks, held = found.get(name, (0, 0))
        found[name] = (blocks + count, held + count * size)
    return tuple(NamespaceFigures(name, *found[name]) for name in sorted(found))
