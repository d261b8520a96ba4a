"""Metrics, logs, traces and clocks.

metrics: every metric, declared once
export: Prometheus text
logging: structured logs
tracing: OpenTelemetry spans, made from timelines
clock: wall time that adjustments do not move; smoothed rates
"""
