"""Offers of a sequence that began with a held cache: what the disk lacks comes from the live cache."""

from __future__ import annotations

from fake_house import CHUNK, FULL, LAYOUT, prompt
from millpond.actors.engine_offers import Offers
from millpond.codecs.choices import SamplingParams
from millpond.codecs.messages import Admit, RestoreReport, Snapshot
from millpond.runtime.channels import channel
from millpond.runtime.kv.blocks import block_chain, pack_tokens
from millpond.runtime.sequence import Sequence
from millpond.runtime.staging import StagingPool

LARGEST = max(group.block_bytes(CHUNK) for group in LAYOUT.groups)


def sequence(full_from: int, held_id: int | None = 1) -> Sequence:
    packed, root = pack_tokens(prompt(30)), b"r" * 32
    admit = Admit(
        request_id=7,
        token_ids=packed,
        root=root,
        chain=block_chain(b"f" * 32, root, packed, CHUNK),
        sampling=SamplingParams(),
        prefix_tokens=16,
        restored=RestoreReport(),
        full_from_block=full_from,
        sliding_blocks=(4,),
        held_id=held_id,
    )
    found = Sequence(admit, 200, 16, 16)
    found.begin_with(16 if held_id is not None else 0)
    found.prefilled = 16
    return found


def offered(one: Sequence, slots: int, steps: list[range]) -> list[list[tuple[int, int]]]:
    """(group, block) of what each step offers; the store takes everything between two steps."""
    pool = StagingPool("spill", slots, LARGEST)
    offers, (outbox, inbox) = Offers(LAYOUT, pool), channel("offers", Snapshot, 99)
    found = []
    for blocks in steps:
        offers.prepare(one, blocks, outbox.room())
        planes = offers.planes()
        found.append([(plane.group, plane.first_token // CHUNK) for plane in planes])
        offers.send([b"x" * 16] * len(planes), {}, outbox)
        one.prefilled += CHUNK * len(blocks)
        for _ in planes:
            message = inbox.receive_nowait()
            pool.give(message.slot, message.lease)
    assert one.refused == 0
    return found


def test_blocks_that_the_disk_lacks_are_offered_in_chain_order_with_the_next_steps() -> None:
    full = FULL.index
    found = offered(sequence(1), 4, [range(4, 5), range(5, 6), range(0), range(0), range(0)])
    assert found == [
        [(full, 1), (full, 2), (0, 4)],
        [(full, 3), (full, 4)],
        [(full, 5)],
        [],
        [],
    ]


def test_what_has_no_room_waits_for_a_later_step_instead_of_ending_the_spilling() -> None:
    full = FULL.index
    one = sequence(2)
    found = offered(one, 1, [range(0), range(0), range(0)])
    assert found == [[(full, 2)], [(full, 3)], []]


def test_a_prefix_that_was_read_from_the_disk_is_not_offered_again() -> None:
    found = offered(sequence(4, held_id=None), 4, [range(4, 5), range(0)])
    assert found == [[(FULL.index, 4), (0, 4)], []]
