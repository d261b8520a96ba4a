"""A request in flight: sequences on workers, repeated after a failure; deltas back.

sequence_jobs: the sequences of a request (pure)
request_run: all outputs of one request: tokens in, deltas out
sequence_run: one output over its attempts
dispatcher: the pair of workers for an attempt
attempt: one attempt: events of both workers in, its end out
recalls: a prompt that waits to another worker, as the next attempt
moves: a running output from one decode worker to another
telemetry: metrics and trace spans at the end, promises of tiers kept
"""
