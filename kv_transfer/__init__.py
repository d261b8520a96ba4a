"""Moves KV blocks between workers: credits, leases, tickets, plans, backends. Knows no models or
schedulers.

Reading order. Pure: plan and coverage (what goes where), leases (the life of one hand-off). Rank 0
of a prefill worker, on its event loop: sender, outgoing, lanes; of a decode worker: receiver,
incoming, arrivals, peers, writers. Every rank, in threads: orders, data_plane, links, backends.
"""
