"""Moves KV blocks between workers: credits, leases, tickets, plans, backends. Knows no models or
schedulers.

Reading order. Pure: plan and coverage (what goes where), leases (the life of one hand-off). Rank 0
of a worker, on its event loop: side (what both do alike); of prefill: sender, outgoing, lanes; of
decode: receiver, incoming, arrivals, peers, writers. Every rank, in threads: orders, data_plane,
links, backends.
"""
