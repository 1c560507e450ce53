"""Prometheus metrics: counted as requests end, and read off the pool when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.actors.http.record import RequestRecord
from millpond.runtime.pool import ModelPool
from millpond.runtime.served import ModelFigures, RootFigures
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, pool: ModelPool) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "millpond_requests", "Requests that ended", ("path", "status"), registry=registry
        )
        self._seconds = Histogram(
            "millpond_request_seconds",
            "Time from a request's head to its end",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._ttft = Histogram(
            "millpond_ttft_seconds",
            "Time from a request's head to its first token; warm: some of the prompt was cached",
            ("cache",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "millpond_tokens", "Tokens of answered requests", ("kind",), registry=registry
        )
        self._misses = Counter(
            "millpond_cache_misses", "Misses of answered requests", ("reason",), registry=registry
        )
        self._live = Gauge("millpond_requests_live", "Requests in the server", registry=registry)
        self._lag = Histogram(
            "millpond_loop_lag_seconds",
            "Lateness of a ticker on the event loop",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        registry.register(_PoolCollector(pool))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry)

    def opened(self) -> None:
        """Count a request in."""
        self._live.inc()

    def closed(self, record: RequestRecord, path: str) -> None:
        """Count a request out; ``path`` is one of a few."""
        self._live.dec()
        self._requests.labels(path, str(record.status)).inc()
        self._seconds.labels(path).observe(record.duration_ms / 1e3)
        if record.choices and record.ttft_ms is not None:
            warm = "warm" if record.cached_tokens else "cold"
            self._ttft.labels(warm).observe(record.ttft_ms / 1e3)
        self._tokens.labels("prompt").inc(record.prompt_tokens)
        self._tokens.labels("cached").inc(record.cached_tokens)
        self._tokens.labels("completion").inc(record.completion_tokens)
        for reason, count in record.misses.items():
            self._misses.labels(reason).inc(count)

    def lagged(self, seconds: float) -> None:
        """Note how late the ticker was."""
        self._lag.observe(seconds)


class _PoolCollector(Collector):
    """Reads a pool whenever metrics are asked for; on the event loop, like all else."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the pool and of each model."""
        figures = self._pool.statistics()
        yield GaugeMetricFamily("millpond_models_loaded", "Loaded models", figures.loaded)
        yield GaugeMetricFamily(
            "millpond_models_bytes", "Bytes of their weights as held", figures.memory_bytes
        )
        yield GaugeMetricFamily(
            "millpond_model_waiters", "Requests that wait for a model", figures.waiting
        )
        yield CounterMetricFamily("millpond_model_loads", "Models loaded", figures.loads)
        yield CounterMetricFamily("millpond_model_evictions", "Models closed", figures.evictions)
        yield CounterMetricFamily("millpond_model_failures", "Failed loads", figures.failures)
        totals = self._pool.totals()
        yield from _of_models(totals)
        roots = [one.root for one in totals.values() if one.root is not None]
        if roots:
            yield from _of_root(roots[-1])

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the pool."""
        return ()


_COUNTS = {
    "prefilled_tokens": "Tokens that went through prefill",
    "shared_tokens": "Tokens of prompts whose rows came from another live cache",
    "decoded_tokens": "Tokens that were chosen",
    "spilled_blocks": "Blocks written to the spill root",
    "spilled_bytes": "Bytes written to the spill root",
    "refused": "Blocks that were offered and not kept",
    "pins": "Prompts that were pinned for a time",
    "pins_refused": "Prompts that were to be pinned and were not",
    "restored_blocks": "Blocks read from the spill root",
    "restored_bytes": "Bytes read from the spill root",
}
_STATES = ("live", "waiting", "running", "restoring")


def _of_models(totals: dict[str, ModelFigures]) -> Iterable[Metric]:
    states = GaugeMetricFamily(
        "millpond_model_requests", "Requests of a loaded model", labels=("model", "state")
    )
    held = GaugeMetricFamily(
        "millpond_held_caches", "Live caches kept for the next turn", labels=("model",)
    )
    healthy = GaugeMetricFamily("millpond_model_healthy", "1: it serves", labels=("model",))
    slots = GaugeMetricFamily("millpond_staging_slots", "Staging slots", labels=("model", "state"))
    for name, found in totals.items():
        for state in _STATES:
            states.add_metric((name, state), getattr(found, state))
        held.add_metric((name,), found.held)
        healthy.add_metric((name,), 0 if found.problem else 1)
        slots.add_metric((name, "lent"), found.slots_lent)
        slots.add_metric((name, "lost"), found.slots_lost)
    yield from (states, held, healthy, slots)
    for field, text in _COUNTS.items():
        family = CounterMetricFamily(f"millpond_{field}", text, labels=("model",))
        for name, found in totals.items():
            family.add_metric((name,), getattr(found, field))
        yield family


def _of_root(root: RootFigures) -> Iterable[Metric]:
    yield GaugeMetricFamily("millpond_spill_root_blocks", "Blocks there", root.blocks)
    yield GaugeMetricFamily("millpond_spill_root_bytes", "Bytes under the root", root.used_bytes)
    held = GaugeMetricFamily(
        "millpond_spill_namespace_bytes", "Bytes of a model's blocks", labels=("namespace",)
    )
    for name, _, size in root.namespaces:
        held.add_metric((name,), size)
    yield held
    yield GaugeMetricFamily("millpond_spill_root_bytes_max", "Its budget", root.bytes_max)
    yield GaugeMetricFamily(
        "millpond_spill_root_healthy", "1: blocks are spilled", 0 if root.problem else 1
    )
    yield GaugeMetricFamily(
        "millpond_quarantine_bytes", "Bytes of bad files kept", root.quarantine_bytes
    )
    yield CounterMetricFamily(
        "millpond_quarantined_blocks", "Bad files set aside", root.quarantined_blocks
    )
    yield CounterMetricFamily("millpond_evicted_blocks", "Blocks evicted", root.evicted_blocks)
