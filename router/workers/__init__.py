"""The workers a router follows, and the choice among them.

worker_set: all of them, as the cluster names them
worker_client: one worker: its event stream, its load, the attempts on it
worker_calls: what is asked of one: submits and cancels, whether it stands still
event_sink: what takes a worker's events of one attempt
balance: which sequences move to a worker that has just begun to decode (pure)
bookkeeping: what a router knows of one beyond its load report: reservations, prefix cache,
    failures (pure)
holders: which workers have the beginning of a prompt
hint_set: the hints that a worker's prefix cache holds, in few bytes
prompt_queues: which prompt should leave the worker on which it waits (pure)
policy: which pair serves a request, and why (pure)
"""
