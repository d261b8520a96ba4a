"""Moves KV blocks between workers: credits, leases, tickets, plans, backends. Knows no models or
schedulers.

Reading order: plan (what goes where), leases (the life of one hand-off), sender and receiver (rank
0 of either worker, on its event loop), data_plane and backends (every rank, in threads).
"""
