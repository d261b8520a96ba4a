"""KV transfer rates and latencies between two workers: `python -m benchmarks.handoff`."""
