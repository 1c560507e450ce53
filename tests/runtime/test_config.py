"""Limits and budgets are checked once, and refused with what was found and expected."""

from __future__ import annotations

import msgspec
import pytest
from millpond.runtime.config import GIB, MIB, Limits, RuntimeConfig, parse_bytes
from millpond.runtime.errors import ConfigError
from millpond.runtime.memory_budget import device_memory


@pytest.mark.parametrize(
    "name", ["sequences_max", "channel_messages", "restore_slots", "spill_slots", "weight_slots"]
)
def test_a_house_needs_one_of_each(name: str) -> None:
    limits = msgspec.structs.replace(Limits(), **{name: 0})
    with pytest.raises(ConfigError, match=rf"limits.{name}: found 0 or less, expected at least 1"):
        RuntimeConfig(model="m", limits=limits).checked()


@pytest.mark.parametrize("name", ["held_max", "bypass_max", "requests_max"])
def test_a_limit_may_be_zero_and_never_less(name: str) -> None:
    RuntimeConfig(model="m", limits=msgspec.structs.replace(Limits(), **{name: 0})).checked()
    with pytest.raises(ConfigError, match=name):
        RuntimeConfig(model="m", limits=msgspec.structs.replace(Limits(), **{name: -1})).checked()


@pytest.mark.parametrize("name", ["kv_bytes_max", "weight_bytes_max", "spill_bytes_max"])
def test_a_budget_is_bytes_a_text_or_a_share(name: str) -> None:
    for value in (0, 10**9, "4GiB", "512 MB", "50%"):
        RuntimeConfig(model="m", **{name: value}).checked()
    for wrong in (-1, "", "many", "120%", "4 apples"):
        with pytest.raises(ConfigError):
            RuntimeConfig(model="m", **{name: wrong}).checked()


def test_texts_and_shares_are_told_in_bytes() -> None:
    assert parse_bytes("1.5GiB", 0) == 1536 * MIB
    assert parse_bytes("512 MB", 0) == 512 * 10**6
    assert parse_bytes("25%", 8 * GIB) == 2 * GIB
    assert parse_bytes(7, 0) == 7


def test_the_device_has_memory() -> None:
    assert device_memory() > 256 * MIB
