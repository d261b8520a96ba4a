"""A trace replayed against the whole stack: `python -m benchmarks.stack`."""
