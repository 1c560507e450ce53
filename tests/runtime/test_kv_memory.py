"""Who gets memory, in which order, and what must go for it."""

from __future__ import annotations

import random

import pytest
from millpond.runtime.admission import WaitingRequests
from millpond.runtime.kv.memory import KvMemory


def names(*texts: str) -> dict[bytes, int]:
    return {text.encode(): 16 * place for place, text in enumerate(texts, 1)}


def test_a_claim_waits_for_room_and_drops_what_was_used_longest_ago() -> None:
    memory = KvMemory(100, 9)
    assert memory.claim(1, 40) == ()
    assert memory.hold(1, 30, names("a")) == ()
    assert memory.claim(2, 40) == ()
    assert memory.hold(2, 30, names("b")) == ()
    assert memory.find([b"a"]) == (1, 16)  # a use: now 2 is the oldest
    assert memory.claim(3, 60) == (2,)
    assert memory.find([b"b"]) is None
    assert memory.claim(4, 60) is None
    assert memory.claim(4, 40) == (1,)
    memory.release(3)
    figures = memory.statistics()
    assert (figures.claims, figures.claimed_bytes, figures.held, figures.dropped) == (1, 40, 0, 2)


def test_a_pinned_cache_stays_and_who_needs_its_memory_waits() -> None:
    memory = KvMemory(100, 9)
    memory.claim(1, 60)
    memory.hold(1, 60, names("a"))
    memory.pin(1)
    assert memory.claim(2, 60) is None
    memory.unpin(1)
    assert memory.claim(2, 60) == (1,)


def test_the_longest_name_that_is_known_is_found() -> None:
    memory = KvMemory(None, 9)
    memory.hold(1, 10, names("a", "ab"))
    memory.hold(2, 10, names("a", "ac"))
    assert memory.find([b"abc", b"ab", b"a"]) == (1, 32)
    assert memory.find([b"ac", b"a"]) == (2, 32)
    assert memory.find([b"a"]) == (2, 16)
    assert memory.find([b"x"]) is None


def test_a_cache_that_serves_nothing_of_its_own_goes() -> None:
    memory = KvMemory(None, 9)
    memory.hold(1, 10, names("a", "ab"))
    assert memory.hold(2, 10, names("a", "ab")) == (1,)
    memory.pin(2)
    assert memory.hold(3, 10, names("a", "ab", "abc")) == ()
    assert memory.find([b"ab"]) == (3, 32)


@pytest.mark.parametrize("held_max", [0, 2])
def test_no_more_caches_are_held_than_allowed(held_max: int) -> None:
    memory = KvMemory(None, held_max)
    dropped = [memory.hold(one, 10, names(f"{one}")) for one in range(4)]
    assert dropped == ([(0,), (1,), (2,), (3,)] if not held_max else [(), (), (0,), (1,)])


def test_the_budget_holds_whatever_happens() -> None:
    draw, memory = random.Random(3), KvMemory(1000, 6)
    claimed: dict[int, int] = {}
    pinned: list[int] = []
    for number in range(5000):
        match draw.randrange(5):
            case 0 | 1:
                size = draw.randrange(1, 400)
                if memory.claim(number, size) is not None:
                    claimed[number] = size
            case 2 if claimed:
                one = draw.choice(list(claimed))
                size = draw.randrange(1, claimed.pop(one) + 1)
                memory.hold(one, size, names(str(draw.randrange(9)), f"b{one}"))
            case 3 if claimed:
                one = draw.choice(list(claimed))
                del claimed[one]
                memory.release(one)
            case _ if pinned:
                memory.unpin(pinned.pop())
            case _:
                found = memory.find([str(draw.randrange(9)).encode()])
                if found is not None:
                    memory.pin(found[0])
                    pinned.append(found[0])
        figures = memory.statistics()
        assert figures.claimed_bytes + figures.held_bytes <= 1000
        assert figures.claimed_bytes == sum(claimed.values())


def test_everybody_who_waits_begins_and_without_bypasses_in_the_order_of_arrival() -> None:
    draw = random.Random(1)
    for bypass_max in (0, 1, 3):
        waiting, order = WaitingRequests(bypass_max), []
        for number in range(300):
            waiting.add(number, draw.randrange(-2, 3))
            if draw.random() < 0.4:
                order.append(taken(waiting))
        while len(waiting):
            order.append(taken(waiting))
        assert sorted(order) == list(range(300))
        assert (order == sorted(order)) is (bypass_max == 0)


def taken(waiting: WaitingRequests) -> int:
    first = waiting.first()
    assert first is not None
    waiting.take(first)
    return first


def test_a_request_begins_after_at_most_so_many_that_came_later() -> None:
    for bypass_max in (1, 2, 5):
        waiting = WaitingRequests(bypass_max)
        waiting.add(0, -100)
        passed = 0
        for number in range(1, 50):
            waiting.add(number, 100)
            if taken(waiting) == 0:
                break
            passed += 1
        assert passed == bypass_max
