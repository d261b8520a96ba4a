"""Bounds and fair order of requests before they reach the workers."""
