"""Rates and added latency of the HTTP and gRPC front ends over stub workers."""
