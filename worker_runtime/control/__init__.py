"""The event-loop half of a worker.

control_service: submit, cancel, status, drain; checks and state of the worker.
event_publisher: one event stream per router, with changes of the prefix cache.
transfers: between the ends of hand-offs and the schedulers.
loans: asks other workers for KV, and answers them.
grammars: compiles grammars of requests on a thread of its own.
"""
