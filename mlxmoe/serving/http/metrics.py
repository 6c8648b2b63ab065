"""What /metrics tells, in Prometheus' form: counts of this app's own, and what the desk says when it is asked."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from mlxmoe.serving.jobs import Desk, Status

CONTENT_TYPE = CONTENT_TYPE_LATEST
PRESSURES = {"normal": 0, "warning": 1, "critical": 2}
TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
REQUEST_BUCKETS_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """The metrics of one app."""

    def __init__(self, desk: Desk) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_DeskCollector(desk))
        self._requests = Counter(
            "mlxmoe_http_requests", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self._ttft = Histogram(
            "mlxmoe_ttft_seconds",
            "From a request to its first token, time in the queue included.",
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._request = Histogram(
            "mlxmoe_request_duration_seconds",
            "From a request to the end of its replies.",
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answer; status 0 is none: the client left before it."""
        route = getattr(scope.get("route"), "path", "none")  # a path that is no route must not become a series
        self._requests.labels(str(route), str(status or 499)).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def request(self, seconds: float) -> None:
        self._request.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _DeskCollector(Collector):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        status = self._desk.status()
        yield from _counters(status)
        yield from _gauges(status)
        yield from _memory(status)

    def describe(self) -> list[Metric]:
        """Nothing: registering asks for it, and the desk may not be there yet."""
        return []


def _counters(status: Status) -> Iterator[Metric]:
    stats = status.stats
    yield CounterMetricFamily(
        "mlxmoe_replies", "Replies that have ended, but for those that were given up.", status.replies
    )
    yield CounterMetricFamily("mlxmoe_generated_tokens", "Tokens of replies.", status.tokens)
    yield CounterMetricFamily(
        "mlxmoe_prompt_tokens", "Tokens of prompts that were begun, stored beginnings included.", status.prompt_tokens
    )
    yield CounterMetricFamily("mlxmoe_refused", "Requests refused for want of room or memory.", status.refused)
    if stats is not None:
        yield CounterMetricFamily("mlxmoe_expert_hits", "Wanted experts that were in memory.", stats.hits)
        yield CounterMetricFamily("mlxmoe_expert_misses", "Wanted experts that had to be read.", stats.misses)
        read = stats.bytes_read + stats.early_bytes
        yield CounterMetricFamily("mlxmoe_expert_read_bytes", "Bytes of experts read, guesses included.", read)


def _gauges(status: Status) -> Iterator[Metric]:
    yield GaugeMetricFamily("mlxmoe_queued", "Replies that wait for their turn.", status.queued)
    yield GaugeMetricFamily("mlxmoe_active", "Replies under way: the batch.", status.active)
    if status.best_batch is not None:
        yield GaugeMetricFamily("mlxmoe_best_batch", "Replies at once, beyond which none gain.", status.best_batch)
    yield GaugeMetricFamily("mlxmoe_tokens_per_second", "Of all replies together, lately.", status.tokens_per_s)
    yield GaugeMetricFamily("mlxmoe_accepts", "1 where new requests are taken.", int(status.accepts))
    pressure = PRESSURES[status.pressure]
    yield GaugeMetricFamily("mlxmoe_memory_pressure", "0 normal, 1 warning, 2 critical.", pressure)
    yield GaugeMetricFamily("mlxmoe_uptime_seconds", "Since the server began.", status.uptime_s)
    if status.stats is not None:
        rate = status.stats.hit_rate
        yield GaugeMetricFamily("mlxmoe_expert_hit_rate", "Share of wanted experts in memory.", rate)


def _memory(status: Status) -> Iterator[Metric]:
    if status.memory is None:
        return
    memory, plan = status.memory, status.memory.plan
    now = GaugeMetricFamily("mlxmoe_memory_bytes", "Memory by what it is for.", labels=["part"])
    parts = {
        "trunk": plan.trunk_bytes,
        "experts": memory.bank_bytes,
        "kv": memory.kv_bytes,
        "prefill": plan.prefill_bytes,
        "pool": memory.reading.pool_bytes,
        "active": memory.reading.active_bytes,
        "footprint": memory.reading.footprint_bytes or 0,
        "available": memory.reading.available_bytes,
        "total": memory.reading.total_bytes,
    }
    for part, nbytes in parts.items():
        now.add_metric([part], nbytes)
    yield now
