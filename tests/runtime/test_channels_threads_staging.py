"""Channels, pinned threads and staging pools on both event loops."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import msgspec
import pytest
from millpond.codecs.messages import Cancel, Finished, Submit, ToGateway, Tokens, ToStore
from millpond.runtime.channels import channel
from millpond.runtime.errors import EngineDied, EngineStalled, RuntimeClosed
from millpond.runtime.staging import StagingPool, StaleLease
from millpond.runtime.threads import PinnedThread

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_message_arrives_equal_and_in_order() -> None:
    outbox, inbox = channel("arrow", ToGateway, 4)
    sent = [
        Tokens(request_id=1, first_index=0, token_ids=(5, 6)),
        Finished(request_id=1, reason="stop"),
    ]
    async with anyio.create_task_group() as group:

        async def produce() -> None:
            async with outbox:
                for message in sent:
                    await outbox.send(message)

        group.start_soon(produce)
        assert [message async for message in inbox] == sent


async def test_a_full_arrow_makes_the_sender_wait() -> None:
    outbox, inbox = channel("arrow", ToStore, 1)
    await outbox.send(Cancel(request_id=1))
    with pytest.raises(anyio.WouldBlock):
        outbox.send_nowait(Cancel(request_id=2))
    with anyio.move_on_after(0.01) as scope:
        await outbox.send(Cancel(request_id=2))
    assert scope.cancelled_caught
    assert (await inbox.receive()).request_id == 1
    with pytest.raises(anyio.WouldBlock):
        inbox.receive_nowait()


async def test_decoding_refuses_what_constructing_allows() -> None:
    outbox, inbox = channel("arrow", ToStore, 2)
    await outbox.send(Cancel(request_id=-1))
    with pytest.raises(msgspec.ValidationError):
        await inbox.receive()
    await outbox.send(Finished(request_id=1, reason="stop"))
    with pytest.raises(msgspec.ValidationError):
        await inbox.receive()


async def test_unknown_fields_are_refused() -> None:
    raw = msgspec.msgpack.encode({"type": "cancel", "request_id": 1, "more": 2})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Submit | Cancel)


async def test_closing_the_receiver_breaks_the_sender() -> None:
    outbox, inbox = channel("arrow", ToStore, 1)
    inbox.close()
    with pytest.raises(anyio.BrokenResourceError):
        await outbox.send(Cancel(request_id=1))


async def test_a_call_runs_on_the_thread_and_returns_or_raises() -> None:
    def fail() -> None:
        raise KeyError("x")

    async with PinnedThread("worker") as thread:
        assert await thread.call(lambda: threading.current_thread().name) == "worker"
        with pytest.raises(KeyError):
            await thread.call(fail)
        assert await thread.call(lambda: 1) == 1
        assert thread.statistics().finished == 3


async def test_a_started_call_is_waited_for_and_a_waiting_one_withdrawn() -> None:
    gate, ran = threading.Event(), []
    started = threading.Event()

    def slow() -> None:
        started.set()
        gate.wait(5)
        ran.append("slow")

    async with PinnedThread("worker") as thread:
        async with anyio.create_task_group() as group:
            group.start_soon(thread.call, slow)
            while not started.is_set():
                await anyio.sleep(0.001)
            group.start_soon(thread.call, lambda: ran.append("late"))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
            threading.Timer(0.02, gate.set).start()
        assert ran == ["slow"]


async def test_a_stalled_thread_fails_every_call_at_once() -> None:
    gate = threading.Event()
    try:
        async with PinnedThread("worker") as thread:
            with pytest.raises(EngineStalled):
                await thread.call(lambda: gate.wait(10), stall_s=0.05)
            with pytest.raises(EngineStalled):
                await thread.call(lambda: None)
    finally:
        gate.set()


async def test_a_thread_that_vanishes_is_noticed() -> None:
    async with PinnedThread("worker") as thread:
        thread._requests.put(None)
        while thread._thread is not None and thread._thread.is_alive():
            await anyio.sleep(0.001)
        with pytest.raises(EngineDied):
            await thread.call(lambda: None)
    with pytest.raises(EngineDied):
        await thread.call(lambda: None)


async def test_an_os_thread_is_used_again_and_a_broken_one_is_not() -> None:
    async with PinnedThread("first") as thread:
        own = await thread.call(threading.current_thread)
    async with PinnedThread("second") as thread:
        again = await thread.call(threading.current_thread)
        assert again is own
        assert again.name == "second"
    gate = threading.Event()
    try:
        async with PinnedThread("third") as thread:
            stuck = await thread.call(threading.current_thread)
            with pytest.raises(EngineStalled):
                await thread.call(lambda: gate.wait(10), stall_s=0.02)
    finally:
        gate.set()
    async with PinnedThread("fourth") as thread:
        assert await thread.call(threading.current_thread) is not stuck
    stuck.join(10)
    assert not stuck.is_alive()


async def test_a_closed_thread_refuses_calls() -> None:
    async with PinnedThread("worker") as thread:
        pass
    with pytest.raises(RuntimeClosed):
        await thread.call(lambda: None)


async def test_many_calls_from_many_tasks_all_answer() -> None:
    results: list[int] = []

    async def ask(thread: PinnedThread, number: int) -> None:
        results.append(await thread.call(lambda: number * number))

    async with PinnedThread("worker") as thread, anyio.create_task_group() as group:
        for number in range(500):
            group.start_soon(ask, thread, number)
    assert sorted(results) == [number * number for number in range(500)]


async def test_a_lease_is_good_for_one_return() -> None:
    pool = StagingPool("pool", 2, 64)
    lease = await pool.lend(10)
    lease.buffer[:] = b"0123456789"
    assert bytes(pool.view(lease.slot, lease.lease, 10)) == b"0123456789"
    pool.give(lease.slot, lease.lease)
    with pytest.raises(StaleLease):
        pool.give(lease.slot, lease.lease)
    again = await pool.lend(10)
    with pytest.raises(StaleLease):
        pool.view(again.slot, lease.lease, 10)
    assert pool.statistics().lent == 1


async def test_an_empty_pool_makes_lend_wait_and_try_lend_refuse() -> None:
    pool = StagingPool("pool", 1, 8)
    first = await pool.lend(8)
    assert pool.try_lend(1) is None
    got: list[Any] = []

    async def wait() -> None:
        got.append(await pool.lend(4))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not got
        pool.give(first.slot, first.lease)
    assert got[0].slot == first.slot
    assert pool.statistics().refused == 1


async def test_a_lost_slot_is_never_lent_again() -> None:
    pool = StagingPool("pool", 1, 8)
    lease = await pool.lend(8)
    pool.lose(lease.slot, lease.lease)
    with pytest.raises(ValueError, match="lost"):
        await pool.lend(1)
