"""Keys of the counters that both schedulers keep: see observability.metrics."""

from __future__ import annotations

from observability import metrics
from observability.metrics import counter_key

FINISHED = counter_key(metrics.WORKER_REQUESTS, outcome="finished")
FAILED = counter_key(metrics.WORKER_REQUESTS, outcome="failed")
#: Ended by the other worker: at token 1 on prefill, or because the client left.
RELEASED = counter_key(metrics.WORKER_REQUESTS, outcome="released")
CANCELLED = counter_key(metrics.WORKER_REQUESTS, outcome="cancelled")
PREEMPTIONS = counter_key(metrics.PREEMPTIONS)
PREFIX_CACHE_QUERIES = counter_key(metrics.PREFIX_CACHE_QUERIES)
PREFIX_CACHE_HITS = counter_key(metrics.PREFIX_CACHE_HITS)
