"""Moves KV blocks between workers: credits, leases, tickets, plans, backends. Knows no models or schedulers."""
