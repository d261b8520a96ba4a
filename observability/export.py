"""Metrics in Prometheus' text format. One `MetricSet` per process object, nothing process-wide.

Text format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from observability import metrics
from observability.metrics import REQUEST_METRICS, Metric, MetricKind, split_counter_key
from protocol.messages import WorkerStatus

PREFIX = "baton_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MODEL_LABEL = "model_name"
_COUNTER_LABELS = {metric.name: metric.labels for metric in metrics.WORKER_COUNTERS}


class MetricSet:
    """The metrics of one router and of its workers.

    Every series has the label `model_name`. With `vllm_names` the metrics that vLLM has too are
    exported a second time as `vllm:<name>`. Safe from any thread.
    """

    def __init__(self, *, model_name: str, vllm_names: bool = False) -> None:
        self._model_name = model_name
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._metrics = {metric.name: self._register(metric) for metric in REQUEST_METRICS}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        for metric in REQUEST_METRICS:
            if not metric.labels:
                self.series(metric, {})  # exported as 0 before its first event
        self.workers = WorkerCollector(model_name)
        self._registry.register(self.workers)

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        self.series(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self.series(metric, labels).set(value)

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        self.series(metric, labels).inc(amount)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        self.series(metric, labels).observe(value)

    def value(self, metric: Metric, **labels: str) -> float:
        """The value of a counter or gauge; the number of values of a histogram."""
        suffix = "_count" if metric.kind is MetricKind.HISTOGRAM else ""
        labels = {_MODEL_LABEL: self._model_name, **labels}
        return self._registry.get_sample_value(PREFIX + metric.name + suffix, labels) or 0.0

    def render(self) -> bytes:
        """The text to serve at /metrics, with CONTENT_TYPE."""
        return generate_latest(_Page(self._registry, vllm_names=self._vllm_names))

    def _register(self, metric: Metric) -> Counter | Gauge | _Histogram:
        name, labels = PREFIX + metric.name, (_MODEL_LABEL, *metric.labels)
        if metric.kind is MetricKind.COUNTER:
            return Counter(name, metric.help, labels, registry=self._registry)
        if metric.kind is MetricKind.GAUGE:
            return Gauge(name, metric.help, labels, registry=self._registry)
        histogram = _Histogram(name, metric, labels)
        self._registry.register(histogram)
        return histogram

    def series(self, metric: Metric, labels: dict[str, str]) -> Any:
        """One series, which a caller with many values may keep."""
        values = tuple(labels[name] for name in metric.labels) if metric.labels else ()
        child = self._children.get((metric.name, values))
        if child is None:
            child = self._metrics[metric.name].labels(self._model_name, *values)
            self._children[metric.name, values] = child
        return child


class _Histogram(Collector):
    """Every series of one histogram. The library's own takes a microsecond and two locks per value,
    and every token has a value."""

    def __init__(self, name: str, metric: Metric, labels: tuple[str, ...]) -> None:
        self._family = (name, metric.help, labels)
        self._bounds = (*metric.buckets, math.inf)
        self._series: dict[tuple[str, ...], _Series] = {}

    def labels(self, *values: str) -> _Series:
        return self._series.setdefault(values, _Series(self._bounds))

    def describe(self) -> Iterator[Family]:
        name, text, labels = self._family
        yield HistogramMetricFamily(name, text, labels=labels)

    def collect(self) -> Iterator[Family]:
        name, text, labels = self._family
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, series in list(self._series.items()):
            counts, total = series.read()
            buckets = zip(map(floatToGoString, self._bounds), accumulate(counts), strict=True)
            family.add_metric(values, list(buckets), total)
        yield family


class _Series:
    """Values with the same labels: their number per bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._total += value

    def read(self) -> tuple[list[int], float]:
        """Counts per bucket, not cumulative, and the sum."""
        with self._lock:
            return list(self._counts), self._total


class WorkerCollector(Collector):
    """Exports `statuses`, the latest of each worker."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.statuses: Sequence[WorkerStatus] = ()

    def collect(self) -> Iterator[Family]:
        statuses = self.statuses
        yield from self._gauges(statuses)
        yield from self._counters(statuses)

    def _gauges(self, statuses: Sequence[WorkerStatus]) -> Iterator[Family]:
        families = {metric.name: self._family(metric) for metric in metrics.WORKER_GAUGES}
        for status in statuses:
            for metric, labels, value in _gauge_values(status):
                families[metric.name].add_metric([self._model_name, *labels], value)
        workers = [(status.role.value, status.state.value) for status in statuses]
        for pair in sorted(set(workers)):
            families[metrics.WORKERS.name].add_metric(
                [self._model_name, *pair], workers.count(pair)
            )
        yield from families.values()

    def _counters(self, statuses: Sequence[WorkerStatus]) -> Iterator[Family]:
        families = {
            metric.name: self._family(metric, extra=metrics.WORKER_LABELS)
            for metric in metrics.WORKER_COUNTERS
        }
        for status in statuses:
            where = [self._model_name, status.role.value, status.ref.worker_id]
            for key, value in {metrics.STEPS.name: status.steps, **status.counters}.items():
                name, labels = split_counter_key(key)
                if name in families:  # a newer worker may have other counters
                    values = [labels.get(label, "") for label in _COUNTER_LABELS[name]]
                    families[name].add_metric([*where, *values], value)
        yield from families.values()

    def _family(
        self, metric: Metric, extra: tuple[str, ...] = ()
    ) -> GaugeMetricFamily | CounterMetricFamily:
        labels = (_MODEL_LABEL, *extra, *metric.labels)
        family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        return family(PREFIX + metric.name, metric.help, labels=labels)


def _gauge_values(status: WorkerStatus) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    load = status.load
    where = (status.role.value, status.ref.worker_id)
    yield metrics.WORKER_RUNNING, where, load.running
    yield metrics.WORKER_WAITING, where, load.waiting
    yield metrics.WORKER_WAITING_TOKENS, where, load.waiting_tokens
    yield metrics.WORKER_TOKEN_RATE, where, load.tokens_per_second
    yield metrics.WORKER_STEP_AGE, where, status.last_step_age_s
    yield metrics.CREDITS, where, load.free_blocks
    if load.total_blocks:
        busy = load.held_blocks + load.quarantined_blocks
        yield metrics.KV_CACHE_USAGE, where, busy / load.total_blocks
    for state, blocks in (
        ("free", load.idle_blocks),
        ("held", load.held_blocks),
        ("cached", load.cached_blocks),
        ("quarantined", load.quarantined_blocks),
    ):
        yield metrics.KV_BLOCKS, (*where, state), blocks
    for one in status.tiers:
        yield metrics.KV_TIER_USED, (*where, one.tier), one.used_bytes
        yield metrics.KV_TIER_SIZE, (*where, one.tier), one.total_bytes
        yield metrics.KV_TIER_RATE, (*where, one.tier), one.bytes_per_second


class _Page(Collector):
    """A registry without `_created` series, and with vLLM's names if enabled."""

    def __init__(self, registry: CollectorRegistry, *, vllm_names: bool) -> None:
        self._registry = registry
        self._aliases = {
            PREFIX + metric.name.removesuffix("_total"): metric.name.removesuffix("_total")
            for metric in metrics.ALL_METRICS
            if vllm_names and metric.vllm
        }

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
            alias = self._aliases.get(family.name)
            if alias is not None:
                yield _renamed(family, family.name, f"vllm:{alias}")


def _renamed(family: Family, old: str, new: str) -> Family:
    copy = Family(new, family.documentation, family.type, family.unit)
    copy.samples = [
        Sample(new + s.name.removeprefix(old), s.labels, s.value, s.timestamp, s.exemplar)
        for s in family.samples
    ]
    return copy
