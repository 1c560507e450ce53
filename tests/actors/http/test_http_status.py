"""Health, metrics and the status page, the last one in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from millpond.runtime.errors import ModelUnreadable

pytestmark = pytest.mark.anyio
BODY = {"prompt": "x" * 40, "max_tokens": 3}


async def test_health_says_what_is_wrong_and_whether_it_matters(start: Any) -> None:
    async with start() as running:
        get = running.client.get
        await running.post("/v1/completions", BODY)
        found = (await get("/health")).json()
        assert (found["status"], found["ready"], found["models"]) == ("ok", True, ["tiny"])
        running.fake.problem = "engine: stalled"
        response = await get("/health")
        assert response.status_code == 503
        assert response.json()["reasons"] == ["tiny: engine: stalled"]
        assert (await get("/health/live")).status_code == 200
        assert (await get("/health/ready")).status_code == 503
        await running.post("/v1/completions", BODY)  # replaces the house
        running.fake.problem = ""


async def test_metrics_count_requests_tokens_hits_and_misses(start: Any) -> None:
    async with start() as running:
        for _ in range(2):
            await running.post("/v1/completions", BODY)
        await running.post("/v1/completions", {"prompt": 7})
        await running.client.get("/made/up")
        response = await running.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        for line in (
            'millpond_requests_total{path="/v1/completions",status="200"} 2.0',
            'millpond_requests_total{path="/v1/completions",status="400"} 1.0',
            'millpond_requests_total{path="other",status="404"} 1.0',
            'millpond_tokens_total{kind="prompt"} 80.0',
            'millpond_tokens_total{kind="cached"} 32.0',
            'millpond_tokens_total{kind="completion"} 6.0',
            'millpond_cache_misses_total{reason="absent"} 1.0',
            'millpond_ttft_seconds_count{cache="warm"} 1.0',
            'millpond_model_requests{model="tiny",state="live"} 0.0',
            "millpond_models_loaded 1.0",
        ):
            assert line in response.text
        assert "made" not in response.text


async def test_admin_loads_and_unloads_and_a_failure_is_clear(start: Any) -> None:
    async with start(names=("a", "b")) as running:
        running.models.failing["b"] = ModelUnreadable("b: broken")
        loaded = await running.post("/admin/models/load", {"model": "a", "keep_alive": 60})
        assert loaded.json() == {"model": "a", "loaded": True}
        failed = await running.post("/admin/models/load", {"model": "b"})
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "model_load_failed"
        assert "broken" in failed.json()["error"]["message"]
        unloaded = await running.post("/admin/models/unload", {"model": "a"})
        assert unloaded.json()["was_loaded"] and running.models.closed == ["a"]
        assert (await running.client.get("/admin/cache")).json()["root"] is None


async def test_the_page_is_self_contained_and_escapes_what_it_shows(start: Any) -> None:
    async with start() as running:
        response = await running.client.get("/")
        assert "default-src 'none'" in response.headers["content-security-policy"]
        links = re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org)", response.text)
        assert links == [] and "innerHTML" not in response.text


async def test_pages_that_follow_are_bounded(start: Any) -> None:
    async with start(watchers_max=1) as running:
        async with running.client.stream("GET", "/status/events") as response:
            async for line in response.aiter_lines():
                assert line.startswith('data: {"live":[')
                break
            assert (await running.client.get("/status/events")).status_code == 429
        while running.services.board.watchers:
            await anyio.lowlevel.checkpoint()


async def test_a_browser_shows_requests_as_they_come(start: Any, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on this machine")
    async with start(names=("tiny-&lt;b&gt;",), watch_s=0.05) as running:
        for _ in range(2):
            await running.post("/v1/completions", BODY)
        await running.client.get("/v1/models")
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1000"]
        picture = tmp_path / "status.png"
        with anyio.fail_after(60):
            shot = [*command, "--timeout=3000", f"--screenshot={picture}", running.url]
            await anyio.run_process(shot, check=True)
            dump = [*command, "--virtual-time-budget=3000", "--dump-dom", running.url]
            page = await anyio.run_process(dump, check=True)
        text = page.stdout.decode()
        assert 'id="state" class="">live<' in text
        assert "tiny-&amp;lt;b&amp;gt;" in text  # a name is text, whatever it looks like
        assert text.count("<circle") == 2 and "absent 1" in text
        assert picture.read_bytes().startswith(b"\x89PNG")
