"""Metrics, logging and tracing. Knows protocol only."""
