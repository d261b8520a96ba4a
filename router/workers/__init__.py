"""The workers a router follows, and the choice among them.

worker_set: all of them, as the cluster names them
worker_client: one worker: its event stream, submits and cancels
reservations: the attempts that a worker's load report does not show yet (pure)
prefix_view: what its prefix cache holds of a prompt (pure)
circuit_breaker: keeps requests from a worker that keeps failing (pure)
policy: which pair serves a request, and why (pure)
"""
