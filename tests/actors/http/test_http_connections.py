"""Connections: what is no HTTP, too large, too late or not allowed in."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from raw_http import BODY, Gate, connected, read_all, read_until, request, until

pytestmark = pytest.mark.anyio


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
            {b"authorization": "bearer sésame".encode()},
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


async def test_a_body_of_too_many_values_is_refused_before_they_are_made(start: Any) -> None:
    """A regression: five million empty lists held up everybody for ten seconds."""
    async with start() as running:
        post = running.client.post
        for values in (b"[],", b"{},", b'"",'):
            body = b'{"prompt":[%s0]}' % (values * 1_200_000)
            response = await post("/v1/completions", content=body)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_complex"
        text = 'a,[{"b": "\\\\"}]' * 5000  # in a text they are letters
        response = await running.post("/tokenize", {"prompt": text})
        assert response.status_code == 200 and response.json()["count"] == len(text)
        ids = {"tokens": [97] * 200_000}
        assert (await running.post("/detokenize", ids)).status_code == 200
