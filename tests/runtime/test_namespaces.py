"""How the blocks under a root divide among models."""

from __future__ import annotations

from millpond.runtime.kv.index import Block, Shelf
from millpond.runtime.kv.namespaces import NamespaceFigures, by_namespace


def shelf(folder: str, count: int, size: int) -> Shelf:
    found = Shelf(folder, "-full-" in folder)
    for number in range(count):
        block = Block(found, bytes([number]), size, None)
        found.blocks[block.chain_hash] = block
    return found


def test_groups_of_a_model_count_together_and_empty_ones_not_at_all() -> None:
    shelves = [
        shelf("v1/bb/g0-full-h1-d2-f32", 3, 100),
        shelf("v1/aa/g0-full-h1-d2-f32", 1, 10),
        shelf("v1/bb/g1-sliding-h1-d2-f32", 2, 7),
        shelf("v1/cc/g0-full-h1-d2-f32", 0, 10),
    ]
    assert by_namespace(shelves) == (
        NamespaceFigures("aa", 1, 10),
        NamespaceFigures("bb", 5, 314),
    )
    assert by_namespace([]) == ()
