"""``Board``: the requests of one server, running and ended, and how late its event loop is."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict
from typing import Any

import anyio
from anyio import current_time
from millpond.actors.http.metrics import Metrics
from millpond.actors.http.record import RequestRecord
from millpond.actors.http.settings import HttpSettings
from millpond.runtime.pool import ModelPool

_log = logging.getLogger("millpond.http")
LAGS = 200
"""Ticks that the shown lag is taken over: ten seconds."""
LIVE_SHOWN_MAX = 64
"""Running requests that the status page lists."""


class Board:
    """Keeps records, bounded; used on the event loop."""

    def __init__(self, pool: ModelPool, settings: HttpSettings) -> None:
        self.metrics = Metrics(pool)
        self._pool, self._settings = pool, settings
        # mutable state, changed only in opened, closed and tick
        self.stopping = False  # changed by Front
        self.watchers = 0  # changed by status pages
        self._live: dict[int, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=settings.history_requests)
        self._lags: deque[float] = deque(maxlen=LAGS)
        self._totals = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "refused": 0}

    @property
    def live(self) -> int:
        """Count of requests in the server."""
        return len(self._live)

    def opened(self, record: RequestRecord) -> None:
        """Take a request in."""
        self._live[id(record)] = record
        self.metrics.opened()

    def closed(self, record: RequestRecord, path: str) -> None:
        """Take a request out, log it, and keep it if it asked a model.

        path  its route, or ``other``: what a client made up is no label
        """
        self._live.pop(id(record), None)
        record.duration_ms = 1e3 * (current_time() - record.started_s)
        record.phase = "ended"
        self.metrics.closed(record, path)
        if record.model or record.choices:
            self._ended.append(record)
            self._totals["requests"] += 1
            self._totals["prompt_tokens"] += record.prompt_tokens
            self._totals["cached_tokens"] += record.cached_tokens
        if record.status in (429, 503):
            self._totals["refused"] += 1
        level = logging.WARNING if record.status >= 500 else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(level, "request %s", record.line())

    async def tick(self) -> None:
        """Measure the loop's lag for ever."""
        while True:
            due = current_time() + self._settings.tick_s
            await anyio.sleep_until(due)
            late = max(0.0, current_time() - due)
            self._lags.append(late)
            self.metrics.lagged(late)

    def snapshot(self) -> dict[str, Any]:
        """Return what the status page shows, JSON data; no text of any prompt or answer."""
        now = current_time()
        live = sorted(self._live.values(), key=lambda record: record.started_s)
        shown = [record for record in live if record.model][:LIVE_SHOWN_MAX]
        ages = [{"age_ms": 1e3 * (now - record.started_s)} for record in shown]
        return {
            "live": [asdict(record) | age for record, age in zip(shown, ages, strict=True)],
            "live_count": sum(bool(record.model) for record in live),
            "ended": [_brief(record) for record in self._ended],
            "totals": dict(self._totals),
            "lag_ms": 1e3 * max(self._lags, default=0.0),
            "pool": asdict(self._pool.statistics()),
            "models": {name: asdict(one) for name, one in self._pool.totals().items()},
            "loaded": sorted(self._pool.loaded()),
        }


def _brief(record: RequestRecord) -> dict[str, Any]:
    return {
        "at": record.started_at,
        "id": record.id,
        "model": record.model,
        "status": record.status,
        "code": record.code,
        "prompt": record.prompt_tokens,
        "cached": record.cached_tokens,
        "completion": record.completion_tokens,
        "ttft_ms": record.ttft_ms,
        "ms": record.duration_ms,
        "misses": record.misses,
    }
