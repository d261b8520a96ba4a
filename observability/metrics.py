"""Every metric, declared as a value: name, kind, meaning, labels, buckets.

Exported names have the prefix `baton_`. Metrics that vLLM has too use vLLM's name, unit and style
of buckets; `vllm=True` allows the export as `vllm:<name>`. A worker keeps integers only
(`WorkerStatus.counters`, keyed by `counter_key`); routers export them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Prometheus' metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. `name` has no prefix; counters end in `_total`, times are in seconds."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: bool = False


def counter_key(metric: Metric, **labels: str) -> str:
    """The key of one series in `WorkerStatus.counters`: `name` or `name{label=value,...}`.

    Raises ValueError unless exactly the metric's labels are given.
    """
    if set(labels) != set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {sorted(labels)}")
    if not labels:
        return metric.name
    return metric.name + "{" + ",".join(f"{name}={labels[name]}" for name in metric.labels) + "}"


def split_counter_key(key: str) -> tuple[str, dict[str, str]]:
    name, brace, rest = key.partition("{")
    if not brace:
        return name, {}
    pairs = (pair.partition("=") for pair in rest.rstrip("}").split(","))
    return name, {label: value for label, _, value in pairs}


def _counter(name: str, text: str, *labels: str, vllm: bool = False) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, help=text, labels=labels, vllm=vllm)


def _gauge(name: str, text: str, *labels: str, vllm: bool = False) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=text, labels=labels, vllm=vllm)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], *labels: str, vllm: bool = False
) -> Metric:
    return Metric(
        name=name, kind=MetricKind.HISTOGRAM, help=text, labels=labels, buckets=buckets, vllm=vllm
    )


# vLLM's bounds, with finer ones below 10 ms, where a modern GPU's decode steps lie.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_PHASE_TIME = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_BYTES = tuple(float(4**power << 10) for power in range(1, 14))  # 4 KiB .. 64 GiB

# --- requests, as the router sees them ------------------------------------------------------------

REQUESTS_RUNNING = _gauge(
    "num_requests_running", "Accepted requests whose first token has been sent.", vllm=True
)
REQUESTS_WAITING = _gauge(
    "num_requests_waiting", "Accepted requests without a token yet.", vllm=True
)
REQUESTS = _counter("requests_total", "Requests received.", "door", "endpoint")
REQUEST_SUCCESS = _counter(
    "request_success_total", "Requests that finished.", "finished_reason", vllm=True
)
REQUEST_FAILURES = _counter(
    "request_failures_total", "Requests that ended in an error.", "door", "code"
)
RESUMES = _counter(
    "request_resumes_total",
    "Requests resubmitted after a worker was lost or did not answer.",
    "cause",
)
MOVES = _counter(
    "request_moves_total",
    "Running outputs that were moved to another decode worker with their KV, or stayed because the "
    "move failed.",
    "outcome",
)
PROMPTS_GIVEN_BACK = _counter(
    "prompts_given_back_total",
    "Prompts that a worker (by its role) gave back before it began with them, because another "
    "should have their first token in time.",
    "role",
)
REFUSALS = _counter(
    "request_refusals_total",
    "Requests refused: a queue is full, or a deadline or target cannot be met. Connections "
    "refused: too many are open.",
    "reason",
)
TIER_PROMISES = _counter(
    "tier_promises_total",
    "Requests of a service tier by whether they kept what it promises: ttft, tpot, gap, and all "
    "of them. Requests that failed kept nothing; refused ones do not count.",
    "tier",
    "promise",
    "outcome",
)
QUEUED_REQUESTS = _gauge("router_queue_requests", "Accepted requests that wait in the router.")
QUEUED_TOKENS = _gauge(
    "router_queue_tokens", "Uncached prompt tokens of requests that wait in the router."
)
DIRECTORY_SILENCE = _gauge(
    "directory_silence_seconds", "Seconds since the directory last answered this router."
)
POOL_WANTED = _gauge("pool_wanted_replicas", "Workers that an autoscaled pool should have.", "pool")
POOL_PINNED = _gauge(
    "pool_pinned", "1 while an operator's size holds an autoscaled pool, else 0.", "pool"
)
PROMPT_TOKENS = _counter("prompt_tokens_total", "Prompt tokens of accepted requests.", vllm=True)
GENERATION_TOKENS = _counter("generation_tokens_total", "Output tokens sent.", vllm=True)
KEY_TOKENS = _counter(
    "key_tokens_total",
    "Tokens of accepted requests by the name of their API key: input (computed), cached (input "
    "that a prefix cache had) and output. Counted at the end, however a request ends.",
    "key",
    "kind",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds", "Arrival to the first token sent.", _TTFT, vllm=True
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds", "Time between successive tokens.", _TOKEN_TIME, vllm=True
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "request_time_per_output_token_seconds",
    "(end-to-end latency - time to first token) / (tokens - 1) of a request.",
    _TOKEN_TIME,
    vllm=True,
)
E2E_LATENCY = _histogram(
    "e2e_request_latency_seconds", "Arrival to the last token sent.", _REQUEST_TIME, vllm=True
)
QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    "Time of a request in queues before its prefill: router, decode blocks, prefill.",
    _REQUEST_TIME,
    vllm=True,
)
PREFILL_TIME = _histogram(
    "request_prefill_time_seconds", "Start of the first chunk to token 1.", _REQUEST_TIME, vllm=True
)
DECODE_TIME = _histogram(
    "request_decode_time_seconds",
    "Start of the first decode step to the last token.",
    _REQUEST_TIME,
    vllm=True,
)
REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS, vllm=True
)
REQUEST_GENERATION_TOKENS = _histogram(
    "request_generation_tokens", "Output tokens of a request.", _TOKENS, vllm=True
)
PHASE_TIME = _histogram(
    "request_phase_seconds", "Time of a request in one phase.", _PHASE_TIME, "phase"
)

# --- the hand-off, as the router sees it (from timelines and its own choices) ---------------------

LOCAL_PREFILLS = _counter(
    "local_prefills_total", "Requests prefilled on their decode worker.", "reason"
)
PAIR_CHOICES = _counter(
    "pair_choices_total",
    "Choices of workers for an attempt, by the reason for the decode worker and the reason for the "
    "prefill worker or for none.",
    "decode",
    "prefill",
)
HANDOFF_TIME = _histogram(
    "handoff_seconds",
    "Announcement of the first piece to acknowledgement of the commit.",
    _PHASE_TIME,
)
HANDOFF_SIZE = _histogram("handoff_size_bytes", "KV bytes of one hand-off.", _BYTES)

# --- workers: gauges from WorkerLoad --------------------------------------------------------------

WORKER_LABELS = ("role", "worker")
WORKERS = _gauge("workers", "Workers, by role and state.", "role", "state")
WORKER_RUNNING = _gauge("worker_requests_running", "Sequences in the batch.", *WORKER_LABELS)
WORKER_WAITING = _gauge(
    "worker_requests_waiting", "Sequences accepted, not yet in the batch.", *WORKER_LABELS
)
WORKER_WAITING_TOKENS = _gauge(
    "worker_waiting_tokens", "Prompt tokens accepted, not yet computed.", *WORKER_LABELS
)
WORKER_TOKEN_RATE = _gauge(
    "worker_tokens_per_second",
    "Prefill: prompt tokens per second of well-filled steps. Decode: output tokens per second.",
    *WORKER_LABELS,
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", *WORKER_LABELS, vllm=True
)
KV_BLOCKS = _gauge(
    "kv_blocks", "KV blocks: free, held, cached or quarantined.", *WORKER_LABELS, "state"
)
KV_TIER_USED = _gauge(
    "kv_tier_used_bytes",
    "Bytes of KV that a tier below the pool holds and the worker can load.",
    *WORKER_LABELS,
    "tier",
)
KV_TIER_SIZE = _gauge(
    "kv_tier_size_bytes", "Bytes that a tier below the pool may hold.", *WORKER_LABELS, "tier"
)
KV_TIER_RATE = _gauge(
    "kv_tier_bytes_per_second", "Rate of the last loads from a tier.", *WORKER_LABELS, "tier"
)
CREDITS = _gauge("handoff_credits", "Blocks that a new hand-off can reserve.", *WORKER_LABELS)
WORKER_STEP_AGE = _gauge(
    "worker_last_step_age_seconds", "Time since the worker's last step.", *WORKER_LABELS
)

# --- workers: counters, in WorkerStatus.counters; role and worker are added by the exporter -------

STEPS = _counter("worker_steps_total", "Steps run.")
WORKER_REQUESTS = _counter(
    "worker_requests_total",
    "Attempts that ended on this worker: finished, failed, cancelled, given back, moved to another "
    "worker, or released by the other worker.",
    "outcome",
)
NON_FINITE_ROWS = _counter(
    "non_finite_rows_total", "Requests ended because the model's output was not finite."
)
PREEMPTIONS = _counter(
    "num_preemptions_total", "Sequences preempted to free their blocks.", vllm=True
)
HELD_TOKENS = _counter(
    "held_first_tokens_total",
    "First tokens that prefill left to decode to send with its next step.",
)
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", vllm=True
)
PREFIX_CACHE_HITS = _counter(
    "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", vllm=True
)
KV_TIER_HITS = _counter(
    "kv_tier_hit_tokens_total",
    "Prompt tokens whose KV came from host memory, a file or another worker (peer), instead of "
    "being computed.",
    "tier",
)
KV_TIER_BYTES = _counter(
    "kv_tier_bytes_total", "KV bytes copied into a tier, and out of it.", "tier", "direction"
)
KV_TIER_EVICTIONS = _counter("kv_tier_evictions_total", "Blocks that a tier evicted.", "tier")
KV_TIER_REFUSALS = _counter(
    "kv_tier_refusals_total",
    "Times that a tier was not used: computing was cheaper (cost), it had no room (full), it was "
    "given up midway (late), answers nothing (hangs) or has lost the blocks (gone).",
    "tier",
    "reason",
)
KV_TIER_FAILURES = _counter(
    "kv_tier_failures_total",
    "Copies of a tier that failed: damaged files, others; of peer: loans.",
    "tier",
    "cause",
)
HANDOFFS = _counter("handoffs_total", "Hand-offs that ended, committed or released.", "outcome")
HANDOFF_FAILURES = _counter("handoff_failures_total", "Hand-offs aborted, by cause.", "cause")
HANDOFF_BYTES = _counter("handoff_bytes_total", "KV bytes sent or received.")
HANDOFF_PIECES = _counter("handoff_pieces_total", "Pieces sent or received.")
HANDOFF_RELINKS = _counter("handoff_relinks_total", "Links rebuilt after they broke.")

REQUEST_METRICS: tuple[Metric, ...] = (
    *(REQUESTS_RUNNING, REQUESTS_WAITING, REQUESTS, REQUEST_SUCCESS, REQUEST_FAILURES, RESUMES),
    *(MOVES, PROMPTS_GIVEN_BACK, REFUSALS, TIER_PROMISES, QUEUED_REQUESTS, QUEUED_TOKENS),
    *(POOL_WANTED, POOL_PINNED, DIRECTORY_SILENCE),
    *(PROMPT_TOKENS, GENERATION_TOKENS, KEY_TOKENS, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY),
    *(TIME_PER_OUTPUT_TOKEN, E2E_LATENCY, QUEUE_TIME, PREFILL_TIME, DECODE_TIME),
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS, PHASE_TIME),
    *(LOCAL_PREFILLS, PAIR_CHOICES, HANDOFF_TIME, HANDOFF_SIZE),
)
WORKER_GAUGES: tuple[Metric, ...] = (
    *(WORKERS, WORKER_RUNNING, WORKER_WAITING, WORKER_WAITING_TOKENS, WORKER_TOKEN_RATE),
    *(KV_CACHE_USAGE, KV_BLOCKS, CREDITS, WORKER_STEP_AGE),
    *(KV_TIER_USED, KV_TIER_SIZE, KV_TIER_RATE),
)
WORKER_COUNTERS: tuple[Metric, ...] = (
    *(
        STEPS,
        WORKER_REQUESTS,
        NON_FINITE_ROWS,
        PREEMPTIONS,
        HELD_TOKENS,
        PREFIX_CACHE_QUERIES,
        PREFIX_CACHE_HITS,
    ),
    *(KV_TIER_HITS, KV_TIER_BYTES, KV_TIER_EVICTIONS, KV_TIER_REFUSALS, KV_TIER_FAILURES),
    *(HANDOFFS, HANDOFF_FAILURES),
    *(HANDOFF_BYTES, HANDOFF_PIECES, HANDOFF_RELINKS),
)
ALL_METRICS: tuple[Metric, ...] = REQUEST_METRICS + WORKER_GAUGES + WORKER_COUNTERS
