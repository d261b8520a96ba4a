import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from observability import metrics
from observability.export import MetricSet
from observability.metrics import (
    ALL_METRICS,
    REQUEST_METRICS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    MetricKind,
    counter_key,
    split_counter_key,
)
from protocol.ids import Role, WorkerRef
from protocol.kv_layout import KVLayout
from protocol.loads import TierLoad
from protocol.messages import WorkerLoad, WorkerStatus
from protocol.states import WorkerState
from tests.support.blocks import FINGERPRINT

LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    num_blocks=100,
    dtype="float32",
    rank_heads=((0, 2),),
)


def status(worker="decode-0", role=Role.DECODE, counters=None, steps=7, tiers=(), **load):
    return WorkerStatus(
        ref=WorkerRef(worker_id=worker, epoch=1, role=role, address="127.0.0.1:1"),
        state=WorkerState.READY,
        role=role,
        load=WorkerLoad(**load),
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        max_model_len=128,
        max_prompt_tokens=100,
        steps=steps,
        last_step_age_s=0.25,
        counters=counters or {},
        tiers=tiers,
    )


def samples(text):
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def of(page, name, **labels):
    return page[name, frozenset({"model_name": "m", **labels}.items())]


def test_names_are_unique_and_all_listed():
    declared = {m.name for m in vars(metrics).values() if isinstance(m, metrics.Metric)}
    names = [m.name for m in ALL_METRICS]
    assert sorted(names) == sorted(declared)
    families = {name.removesuffix("_total") for name in names}  # of OpenMetrics
    assert len(names) == len(families)


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda m: m.name)
def test_names_follow_prometheus_rules(metric):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
    assert metric.help.endswith(".")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert not {"model_name", "le"} & set(metric.labels)


def test_counter_keys_round_trip():
    assert counter_key(metrics.STEPS) == "worker_steps_total"
    key = counter_key(metrics.HANDOFF_FAILURES, cause="stale_message")
    assert key == "handoff_failures_total{cause=stale_message}"
    assert split_counter_key(key) == ("handoff_failures_total", {"cause": "stale_message"})
    assert split_counter_key("worker_steps_total") == ("worker_steps_total", {})


@pytest.mark.parametrize("labels", [{}, {"reason": "x"}, {"cause": "x", "reason": "y"}])
def test_counter_key_wants_exactly_the_labels(labels):
    with pytest.raises(ValueError, match="handoff_failures_total"):
        counter_key(metrics.HANDOFF_FAILURES, **labels)


def test_own_metrics_are_counted_and_rendered():
    page = MetricSet(model_name="m")
    page.count(metrics.PROMPT_TOKENS, 12)
    page.count(metrics.REQUEST_FAILURES, door="http", code="overloaded")
    page.add(metrics.REQUESTS_RUNNING, 2)
    page.add(metrics.REQUESTS_RUNNING, -1)
    page.observe(metrics.TIME_TO_FIRST_TOKEN, 0.05)
    page.observe(metrics.TIME_TO_FIRST_TOKEN, 5000.0)
    found = samples(page.render())
    assert of(found, "baton_prompt_tokens_total") == 12
    assert of(found, "baton_request_failures_total", door="http", code="overloaded") == 1
    assert of(found, "baton_num_requests_running") == 1
    assert of(found, "baton_time_to_first_token_seconds_count") == 2
    assert of(found, "baton_time_to_first_token_seconds_bucket", le="0.06") == 1
    assert of(found, "baton_time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert page.value(metrics.REQUESTS_RUNNING) == 1
    assert page.value(metrics.TIME_TO_FIRST_TOKEN) == 2
    assert page.value(metrics.REQUEST_FAILURES, door="grpc", code="internal") == 0


def test_label_order_of_the_call_does_not_matter():
    page = MetricSet(model_name="m")
    page.count(metrics.REQUESTS, door="http", endpoint="chat")
    page.count(metrics.REQUESTS, endpoint="chat", door="http")
    assert page.value(metrics.REQUESTS, door="http", endpoint="chat") == 2


def test_a_missing_label_is_an_error():
    with pytest.raises(KeyError):
        MetricSet(model_name="m").count(metrics.REQUESTS, door="http")


def test_unlabelled_metrics_start_at_zero_on_the_page():
    found = samples(MetricSet(model_name="m").render())
    assert of(found, "baton_generation_tokens_total") == 0
    assert not any(name.endswith("_created") for name, _ in found)


def test_two_sets_share_nothing():
    first, second = MetricSet(model_name="m"), MetricSet(model_name="m")
    first.count(metrics.PROMPT_TOKENS, 5)
    assert second.value(metrics.PROMPT_TOKENS) == 0


def test_vllm_names_repeat_exactly_the_shared_figures():
    page = MetricSet(model_name="m", vllm_names=True)
    page.count(metrics.REQUEST_SUCCESS, finished_reason="stop")
    page.observe(metrics.INTER_TOKEN_LATENCY, 0.02)
    page.workers.statuses = [status(held_blocks=25, total_blocks=100)]
    found = samples(page.render())
    assert of(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert of(found, "vllm:inter_token_latency_seconds_count") == 1
    usage = of(found, "vllm:kv_cache_usage_perc", role="decode", worker="decode-0")
    assert usage == 0.25
    exported = {name.removeprefix("vllm:") for name, _ in found if name.startswith("vllm:")}
    shared = {metric.name for metric in ALL_METRICS if metric.vllm}
    assert all(any(name.startswith(known) for known in shared) for name in exported)


def test_vllm_names_are_off_by_default():
    assert b"vllm:" not in MetricSet(model_name="m").render()


def test_worker_gauges_come_from_its_load():
    page = MetricSet(model_name="m")
    page.workers.statuses = [
        status(
            running=3,
            waiting=2,
            waiting_tokens=640,
            free_blocks=60,
            total_blocks=100,
            held_blocks=30,
            cached_blocks=8,
            quarantined_blocks=2,
            tokens_per_second=55.5,
        )
    ]
    found = samples(page.render())
    where = {"role": "decode", "worker": "decode-0"}
    assert of(found, "baton_worker_requests_running", **where) == 3
    assert of(found, "baton_worker_requests_waiting", **where) == 2
    assert of(found, "baton_worker_waiting_tokens", **where) == 640
    assert of(found, "baton_worker_tokens_per_second", **where) == 55.5
    assert of(found, "baton_handoff_credits", **where) == 60
    assert of(found, "baton_kv_cache_usage_perc", **where) == 0.32
    blocks = {s: of(found, "baton_kv_blocks", **where, state=s) for s in ("free", "held")}
    assert blocks == {"free": 60, "held": 30}
    assert of(found, "baton_kv_blocks", **where, state="quarantined") == 2
    assert of(found, "baton_worker_last_step_age_seconds", **where) == 0.25


def test_tiers_show_their_room_and_rate():
    page = MetricSet(model_name="m")
    host = TierLoad(tier="host", used_bytes=5, total_bytes=9, bytes_per_second=2.5)
    page.workers.statuses = [status(tiers=(host,))]
    found = samples(page.render())
    where = {"role": "decode", "worker": "decode-0", "tier": "host"}
    assert of(found, "baton_kv_tier_used_bytes", **where) == 5
    assert of(found, "baton_kv_tier_size_bytes", **where) == 9
    assert of(found, "baton_kv_tier_bytes_per_second", **where) == 2.5


def test_worker_counters_and_unknown_ones():
    page = MetricSet(model_name="m")
    counters = {
        counter_key(metrics.PREEMPTIONS): 4,
        counter_key(metrics.HANDOFFS, outcome="committed"): 9,
        "something_newer_total": 1,
    }
    page.workers.statuses = [status(counters=counters, steps=70)]
    found = samples(page.render())
    where = {"role": "decode", "worker": "decode-0"}
    assert of(found, "baton_num_preemptions_total", **where) == 4
    assert of(found, "baton_handoffs_total", **where, outcome="committed") == 9
    assert of(found, "baton_worker_steps_total", **where) == 70
    assert not any("something_newer" in name for name, _ in found)


def test_workers_are_counted_by_state_and_forgotten():
    page = MetricSet(model_name="m")
    decodes = [status("decode-0"), status("decode-1")]
    page.workers.statuses = [*decodes, status("prefill-0", Role.PREFILL)]
    found = samples(page.render())
    assert of(found, "baton_workers", role="decode", state="ready") == 2
    assert of(found, "baton_workers", role="prefill", state="ready") == 1
    page.workers.statuses = decodes[:1]
    found = samples(page.render())
    assert of(found, "baton_workers", role="decode", state="ready") == 1
    assert not any(("worker", "decode-1") in labels for _, labels in found)


def test_groups_cover_everything_once():
    assert set(ALL_METRICS) == {*REQUEST_METRICS, *WORKER_GAUGES, *WORKER_COUNTERS}
    assert all(metric.kind is MetricKind.COUNTER for metric in WORKER_COUNTERS)
    assert all(metric.kind is MetricKind.GAUGE for metric in WORKER_GAUGES)
