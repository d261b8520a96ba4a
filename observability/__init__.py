"""Metrics, logs, traces and clocks.

metrics: every metric, declared once
export: Prometheus text
logging: structured logs
tracing: OpenTelemetry spans, made from timelines
rate: smoothed tokens per second
clock: wall time that adjustments do not move
"""
