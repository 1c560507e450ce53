"""The server under bad clients: gone, slow, too many, too large; and its end."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}


# log-probabilities make chunks large: a socket's buffers are full after a few thousand
MUCH: dict[str, Any] = BODY | {"stream": True, "max_tokens": 12_000, "logprobs": 20}


async def connected(running: Any) -> SocketStream:
    return await anyio.connect_tcp("127.0.0.1", running.port)


def request(path: str, body: Any = None, **headers: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None and "content_length" not in headers:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def read_until(stream: SocketStream, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        data += await stream.receive()
    return data


async def read_all(stream: SocketStream) -> bytes:
    data = b""
    try:
        while True:
            data += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return data


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


class Gate:
    """Lets a number of tokens pass, then none until it is opened."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.event, self.reached = tokens, anyio.Event(), anyio.Event()

    def __call__(self, index: int) -> anyio.Event | None:
        if index < self.tokens:
            return None
        self.reached.set()
        return self.event


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


async def test_a_client_that_goes_away_behind_a_second_request_stops_the_first(
    start: Any,
) -> None:
    """A regression: what was pipelined behind a request hid the end of its connection."""
    async with start() as running:
        gate = running.fake.pace = Gate(0)
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY) * 2)
        await gate.reached.wait()
        await stream.aclose()
        await until(lambda: running.fake.live == 0 and running.server.connections == 0)
        assert running.fake.cancelled == 1 and len(running.fake.asks) == 1


async def test_requests_that_are_pipelined_are_answered_in_order(start: Any) -> None:
    async with start() as running:
        stream = await connected(running)
        ids = [f"r-{number}" for number in range(6)]
        sent = b"".join(
            request("/v1/completions", BODY | {"max_tokens": 3}, x_request_id=one) for one in ids
        )
        await stream.send(sent)
        data = b""
        while data.count(b'"finish_reason":"length"') < len(ids):
            data += await stream.receive()
        places = [data.index(f"x-request-id: {one}".encode()) for one in ids]
        assert places == sorted(places)
        await stream.aclose()


async def test_what_is_pipelined_without_end_is_cut_off(start: Any) -> None:
    async with start() as running:
        gate = running.fake.pace = Gate(0)
        stream = await connected(running)
        await stream.send(request("/v1/completions", BODY))
        await gate.reached.wait()
        with pytest.raises(anyio.BrokenResourceError):
            while True:
                await stream.send(request("/v1/completions", BODY) * 100)
        await until(lambda: running.fake.live == 0 and running.server.connections == 0)
        await stream.aclose()


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


async def test_a_body_too_large_is_refused_and_its_client_reads_why(start: Any) -> None:
    async with start(body_bytes_max=1000) as running:
        response = await running.client.post("/v1/completions", content=b"x" * 3_000_000)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"

        async def parts() -> Any:
            for _ in range(100):
                yield b"x" * 10_000

        response = await running.client.post("/v1/completions", content=parts())
        assert response.status_code == 413


async def test_a_refused_body_that_fills_every_queue_does_not_hold_its_connection(
    start: Any,
) -> None:
    """A regression: the end of a response waited for room in the queue of the body behind it."""
    async with start(body_bytes_max=1000) as running:
        stream = await connected(running)
        await stream.send(request("/v1/completions", {}, content_length=str(2**30)))
        async with anyio.create_task_group() as group:

            async def flood() -> None:
                try:
                    while True:
                        await stream.send(b"x" * 65536)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    pass

            group.start_soon(flood)
            assert b"413" in await read_until(stream, b"body_too_large")
            await until(lambda: running.front.live == 0)
            await stream.aclose()
            await until(lambda: running.server.connections == 0)


async def test_a_body_that_does_not_come_is_not_waited_for(start: Any) -> None:
    async with start(body_s=0.05) as running:
        stream = await connected(running)
        await stream.send(request("/v1/completions", {"a": 1}, content_length="1000"))
        data = await read_all(stream)
        assert b"408" in data.split(b"\r\n")[0] and b"body_timeout" in data


async def test_a_head_that_does_not_come_is_not_waited_for(start: Any) -> None:
    async with start(head_s=0.05) as running:
        silent, slow = await connected(running), await connected(running)
        await slow.send(b"GET / HTTP/1.1\r\n")
        assert await read_all(silent) == b""
        assert await read_all(slow) == b""
        await until(lambda: running.server.connections == 0)


async def test_a_head_too_large_is_refused(start: Any) -> None:
    async with start(head_bytes_max=1000) as running:
        stream = await connected(running)
        await stream.send(request("/health", x=("y" * 200_000)))
        data = await read_all(stream)
        assert data.startswith(b"HTTP/1.1 431") and b'"code":"invalid_http"' in data


async def test_an_idle_connection_is_closed(start: Any) -> None:
    async with start(keep_alive_s=0.05) as running:
        stream = await connected(running)
        await stream.send(request("/health"))
        assert b"200" in await read_all(stream)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n"
        b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"\r\n" * 10_000,
    ],
)
async def test_what_is_no_http_ends_its_connection_and_nothing_else(
    start: Any, data: bytes
) -> None:
    async with start(head_s=0.2, keep_alive_s=0.2) as running:
        stream = await connected(running)
        await stream.send(data)
        await read_all(stream)
        await stream.aclose()
        assert (await running.client.get("/health")).status_code == 200


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


async def test_connections_beyond_the_bound_are_turned_away(start: Any) -> None:
    async with start(connections_max=2) as running:
        first, second, third = [await connected(running) for _ in range(3)]
        assert b"too_many_connections" in await read_all(third)
        for stream in (first, second):
            await stream.aclose()


async def test_a_key_is_asked_for_where_there_is_data(start: Any) -> None:
    async with start(api_key="sésame") as running:
        for path in ("/v1/models", "/metrics", "/status.json", "/admin/cache", "/openapi.json"):
            response = await running.client.get(path)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        for headers in (
            {b"authorization": "Bearer sésame".encode()},
            {b"x-api-key": "sésame".encode()},
        ):
            response = await running.client.get("/v1/models", headers=headers)
            assert response.status_code == 200
        assert (await running.client.get("/health")).status_code == 200
        assert (await running.client.get("/")).status_code == 200


async def test_no_web_page_of_another_origin_or_name_gets_in(start: Any) -> None:
    async with start(hosts=("127.0.0.1",), origins=("https://mine",)) as running:
        get = running.client.get
        evil = {"host": f"evil.example:{running.port}"}
        assert (await get("/v1/models", headers=evil)).status_code == 403
        assert (await get("/v1/models", headers={"origin": "https://evil"})).status_code == 403
        assert (await get("/v1/models", headers={"origin": "null"})).status_code == 403
        assert (await get("/v1/models", headers={"origin": running.url})).status_code == 200
        mine = {"origin": "https://mine"}
        response = await get("/v1/models", headers=mine)
        assert response.headers["access-control-allow-origin"] == "https://mine"
        refused = await running.post("/v1/completions", {"prompt": 5}, headers=mine)
        assert refused.status_code == 400 and "access-control-allow-origin" in refused.headers
        assert "access-control-allow-origin" not in (await get("/v1/models")).headers


async def test_a_browser_asks_before_a_page_that_may_call_does(start: Any) -> None:
    async with start(origins=("https://mine",), api_key="key") as running:
        asks = {"origin": "https://mine", "access-control-request-method": "POST"}
        response = await running.client.options("/v1/completions", headers=asks)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == "https://mine"
        assert "authorization" in response.headers["access-control-allow-headers"]
        asks["origin"] = "https://evil"
        assert (await running.client.options("/v1/completions", headers=asks)).status_code == 403
        plain = await running.client.options("/v1/completions")
        assert plain.status_code == 401


async def test_a_wrong_method_is_told_the_right_ones(start: Any) -> None:
    async with start() as running:
        response = await running.client.get("/v1/completions")
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        assert response.json()["error"]["code"] == "method_not_allowed"


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
