#!/usr/bin/env python3
"""Compare eviction policies on a synthetic trace of agents.  One JSON line; no clock, no model.

    scripts/bench_eviction.py
    scripts/bench_eviction.py --requests 8000 --seed 3

The trace has system prompts that agents share (some far more popular than others), conversations
that grow turn by turn and go quiet, and long prompts that never come again.  A request hits the
leading blocks that are there, then writes the rest, block by block; room is made leaf-first.

millpond  the index as it is: 2Q (Johnson & Shasha, VLDB 1994) on trees
lru       least recently used leaf; a use of a block is a later use of its parent
s3fifo    S3-FIFO (Yang et al., SOSP 2023) on leaves: small and main queue, ghosts, 2-bit counts

``hit_rate`` is blocks found over blocks asked for, by budget as a share of all distinct blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from millpond.runtime.kv.index import PrefixIndex

FOLDER = "v1/bench/g0-full-h1-d1-f32"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
SMALL_SHARE = 0.1  # of S3-FIFO's small queue
COUNT_MAX = 3
Chain = list[bytes]


class Policy(Protocol):
    """A cache of blocks in trees, of a fixed count."""

    def request(self, chain: Chain) -> int:
        """Serve one prompt; return how many leading blocks were there."""


class Millpond:
    """The spill store's own index."""

    def __init__(self, blocks_max: int) -> None:
        self._index, self._max = PrefixIndex(), blocks_max
        self._shelf = self._index.shelf(FOLDER)

    def request(self, chain: Chain) -> int:
        """Serve one prompt."""
        index, there = self._index, self._shelf.blocks
        found = _leading(chain, there)
        if found:
            index.use((there[chain[found - 1]],))
        parent = chain[found - 1] if found else None
        for name in chain[found:]:
            pinned = (there[parent],) if parent is not None else ()
            index.pin(pinned)
            if index.count >= self._max and not index.victims(1):
                index.unpin(pinned)
                return found
            index.unpin(pinned)
            index.add(self._shelf, name, 1, parent)
            parent = name
        return found


class Lru:
    """Least recently used first; parents are used after their children, so leaves go first."""

    def __init__(self, blocks_max: int) -> None:
        self._max = blocks_max
        self._there: OrderedDict[bytes, None] = OrderedDict()

    def request(self, chain: Chain) -> int:
        """Serve one prompt."""
        found = _leading(chain, self._there)
        for name in reversed(chain[: self._max]):
            self._there[name] = None
            self._there.move_to_end(name)
        while len(self._there) > self._max:
            self._there.popitem(last=False)
        return found


class S3Fifo:
    """Two queues of leaves; a block that is no leaf counts as used when it comes up."""

    def __init__(self, blocks_max: int) -> None:
        self._max, self._small_max = blocks_max, max(1, int(SMALL_SHARE * blocks_max))
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._count: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes | None] = {}

    def request(self, chain: Chain) -> int:
        """Serve one prompt."""
        found = _leading(chain, self._count)
        for name in chain[:found]:
            self._count[name] = min(COUNT_MAX, self._count[name] + 1)
        parent = chain[found - 1] if found else None
        for name in chain[found:]:
            if len(self._count) >= self._max and not self._evict(parent):
                return found
            if name in self._ghosts:
                del self._ghosts[name]
                self._main[name] = None
            else:
                self._small[name] = None
            self._count[name], self._children[name], self._parent[name] = 0, 0, parent
            if parent is not None:
                self._children[parent] += 1
            parent = name
        return found

    def _evict(self, kept: bytes | None) -> bool:
        """Remove one leaf other than ``kept``; False if there is none."""
        for _ in range(8 * self._max):
            from_small = len(self._small) >= self._small_max or not self._main
            queue = self._small if from_small and self._small else self._main
            name, _ = queue.popitem(last=False)
            if from_small and self._count[name] > 1:
                self._count[name] = 0
                self._main[name] = None
            elif self._children[name] or name == kept:
                queue[name] = None
            elif not from_small and self._count[name]:
                self._count[name] -= 1
                queue[name] = None
            else:
                self._remove(name, is_ghost=from_small)
                return True
        return False

    def _remove(self, name: bytes, *, is_ghost: bool) -> None:
        parent = self._parent.pop(name)
        if parent is not None:
            self._children[parent] -= 1
        del self._count[name], self._children[name]
        if is_ghost:
            self._ghosts[name] = None
            while len(self._ghosts) > self._max:
                self._ghosts.popitem(last=False)


def _leading(chain: Chain, there: object) -> int:
    assert hasattr(there, "__contains__")
    for number, name in enumerate(chain):
        if name not in there:
            return number
    return len(chain)


def trace(requests: int, seed: int, scans: float) -> Iterator[Chain]:
    """Iterate over the chains of requests.

    scans  share of requests that are long one-off prompts
    """
    draw = random.Random(seed)
    systems = [_grown([], (f"system {n}", draw.randint(4, 40))) for n in range(40)]
    weights = [1 / (n + 1) for n in range(len(systems))]
    talks: list[Chain] = []
    for number in range(requests):
        if draw.random() < scans:
            yield _grown([], (f"scan {number}", draw.randint(20, 200)))
        elif talks and draw.random() < 0.75:
            # of the conversations that are open, those that spoke last go on most often
            at = len(talks) - 1 - min(int(draw.expovariate(0.1)), len(talks) - 1)
            talk = _grown(talks.pop(at), (f"turn {number}", draw.randint(1, 6)))
            if draw.random() < 0.9:
                talks.append(talk)
            yield talk
        else:
            (system,) = draw.choices(systems, weights)
            talks.append(_grown(system, (f"talk {number}", draw.randint(1, 6))))
            yield talks[-1]


def _grown(chain: Chain, more: tuple[str, int]) -> Chain:
    words, count = more
    names = (hashlib.sha256(f"{words} {index}".encode()).digest() for index in range(count))
    return [*chain, *names]


def hit_rate(policy: Policy, chains: list[Chain]) -> float:
    """Return blocks found over blocks asked for."""
    found = sum(policy.request(chain) for chain in chains)
    return round(found / sum(map(len, chains)), 4)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report: dict[str, object] = {"bench": "eviction", "requests": options.requests}
    report["seed"] = options.seed
    for scans in (0.0, 0.1, 0.3):
        chains = list(trace(options.requests, options.seed, scans))
        distinct = len({name for chain in chains for name in chain})
        report[f"scans_{scans:.0%}"] = {
            f"budget_{share:.0%}": {
                name: hit_rate(make(max(1, int(share * distinct))), chains)
                for name, make in (("millpond", Millpond), ("lru", Lru), ("s3fifo", S3Fifo))
            }
            for share in SHARES
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
