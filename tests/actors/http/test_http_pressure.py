"""The server under bad clients: gone, slow, too many; and its end."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from raw_http import BODY, Gate, connected, read_all, read_until, request, until

pytestmark = pytest.mark.anyio


# log-probabilities make chunks large: a socket's buffers are full after a few thousand
MUCH: dict[str, Any] = BODY | {"stream": True, "max_tokens": 12_000, "logprobs": 20}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("tokens", [0, 5])
async def test_a_client_that_goes_away_stops_its_request(
    start: Any, streaming: bool, tokens: int
) -> None:
    async with start() as running:
        gate = running.fake.pace = Gate(tokens)
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY | {"stream": streaming}))
        await gate.reached.wait()
        assert running.fake.live == 1
        await stream.aclose()
        await until(lambda: running.fake.live == 0 and running.front.live == 0)
        assert running.fake.cancelled == 1
        await until(lambda: running.server.connections == 0)
        assert running.services.pool.statistics().users == 0


async def test_choices_of_a_client_that_goes_away_stop_together(start: Any) -> None:
    async with start() as running:
        gate = running.fake.pace = Gate(3)
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY | {"stream": True, "n": 4}))
        await gate.reached.wait()
        await until(lambda: running.fake.live == 4)
        await stream.aclose()
        await until(lambda: running.fake.live == 0)
        assert running.fake.cancelled == 4


async def test_a_reader_that_stops_reading_is_cut_and_frees_its_request(start: Any) -> None:
    async with start(write_stall_s=0.3) as running:
        running.fake.context_tokens = 10**7
        stream = await connected(running)
        await stream.send(request("/v1/completions", MUCH))
        await until(lambda: running.fake.live == 1)
        await until(lambda: running.fake.live == 0)
        assert running.fake.cancelled == 1 and running.fake.tokens_given < MUCH["max_tokens"]
        await until(lambda: running.server.connections == 0)
        await stream.aclose()


async def test_a_slow_reader_holds_the_writer_up_and_gets_everything(start: Any) -> None:
    async with start() as running:
        running.fake.context_tokens = 10**7
        stream = await connected(running)
        await stream.send(request("/v1/completions", MUCH))
        await until(lambda: running.fake.tokens_given > 100)
        before = -1
        while before != running.fake.tokens_given:  # the socket's buffers fill
            before = running.fake.tokens_given
            for _ in range(2000):
                await anyio.lowlevel.checkpoint()
        assert before < MUCH["max_tokens"]
        tail = b""
        while b"[DONE]" not in tail:
            tail = tail[-1000:] + await stream.receive()
        assert b'"finish_reason":"length"' in tail
        await stream.aclose()


async def test_silence_is_filled_with_comments(start: Any) -> None:
    async with start(heartbeat_s=0.02) as running:
        gate = running.fake.pace = Gate(0)
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY | {"stream": True, "max_tokens": 2}))
        data = await read_until(stream, b": still working\n\n")
        assert b"200" in data.split(b"\r\n")[0] and b"data:" not in data
        gate.event.set()
        assert b"data: {" in await read_until(stream, b"[DONE]")
        await stream.aclose()


async def test_a_model_that_loads_is_waited_for_with_comments(start: Any) -> None:
    async with start(heartbeat_s=0.02) as running:
        gate = running.models.gates["tiny"] = anyio.Event()
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY | {"stream": True, "max_tokens": 2}))
        await read_until(stream, b": still working\n\n")
        gate.set()
        await read_until(stream, b"[DONE]")
        await stream.aclose()


async def test_a_request_that_takes_too_long_ends_with_an_error(start: Any) -> None:
    async with start(request_s=0.05) as running:
        running.fake.pace = Gate(2)
        response = await running.post("/v1/completions", BODY)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        streamed = await running.post("/v1/completions", BODY | {"stream": True})
        assert streamed.status_code == 200 and "request_timeout" in streamed.text
        await until(lambda: running.fake.live == 0)


async def test_requests_beyond_the_bound_are_told_to_come_back(start: Any) -> None:
    async with start(requests_max=2) as running:
        gate = running.fake.pace = Gate(0)
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(running.post, "/v1/completions", BODY)
            await until(lambda: running.fake.live == 2)
            response = await running.post("/v1/completions", BODY)
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["code"] == "too_many_requests"
            assert (await running.client.get("/health")).status_code == 200
            gate.event.set()


async def test_stopping_lets_a_stream_finish_and_refuses_new_requests(start: Any) -> None:
    async with start() as running:
        gate = running.fake.pace = Gate(1)
        busy, idle = await connected(running), await connected(running)
        await busy.send(request("/v1/completions", BODY | {"stream": True, "max_tokens": 3}))
        await read_until(busy, b"data: {")
        running.stopping.set()
        assert await read_all(idle) == b""
        with pytest.raises(OSError):
            await until(lambda: running.services.board.stopping)
            await connected(running)
        gate.event.set()
        assert b"[DONE]" in await read_all(busy)


async def test_a_stream_that_outlives_the_drain_is_cut_and_told(start: Any) -> None:
    async with start(drain_s=0.05) as running:
        running.fake.pace = Gate(1)
        streamed, whole = await connected(running), await connected(running)
        await streamed.send(request("/v1/completions", BODY | {"stream": True}))
        await whole.send(request("/v1/completions", BODY))
        await until(lambda: running.fake.live == 2)
        running.stopping.set()
        assert b"server_stopping" in await read_all(streamed)
        data = await read_all(whole)
        assert b"503" in data.split(b"\r\n")[0] and b"server_stopping" in data
        assert running.fake.live == 0


async def test_logs_have_ids_and_figures_and_no_text(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start() as running:
        secret = {"prompt": "sesame-open", "stop": "sesame-stop", "max_tokens": 3}
        headers = {"x-request-id": "my-1"}
        response = await running.post("/v1/completions", secret, headers=headers)
        assert response.headers["x-request-id"] == "my-1"
        forged = {"x-request-id": "a b\tstatus=200"}
        assert (await running.post("/v1/completions", {"sesame-a": 1}, headers=forged)).is_error
        await running.post("/v1/completions", {"prompt": {"sesame": 1}})
        await running.client.get("/sesame%20status=1%0aid=x")
    lines = [one.getMessage() for one in caplog.records if one.name == "millpond.http"]
    assert any("id=my-1 " in one and "completion_tokens=3" in one for one in lines)
    assert not any("sesame-" in one or "\n" in one for one in lines)
    assert any("path=/sesame_status_1_id_x" in one for one in lines)


async def test_a_bug_is_answered_and_logged_without_what_it_says(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as running:

        def broken(index: int) -> None:
            raise LookupError("sesame")

        running.fake.pace = broken
        for body in (BODY, BODY | {"n": 2}, BODY | {"stream": True}):
            response = await running.post("/v1/completions", body)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
        running.fake.pace = None
        assert (await running.post("/v1/completions", BODY)).status_code == 200
    assert "LookupError" in caplog.text and "sesame" not in caplog.text
