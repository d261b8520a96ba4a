"""Values that all processes of a cluster share: no torch, no ray, no I/O.

message: base class of every value that crosses between processes
codec: messages to bytes and back, strictly
errors: every failure that a caller can see, and its HTTP and gRPC status
ids: requests, attempts, workers and their epochs
states: life cycles and their transition tables
sampling: how tokens are chosen, grammars, log-probabilities
timeline: spans of a request, trace context
kv_layout: the shape of a worker's KV, and cells that two workers share
prefix: names of KV blocks by content
ticket: the router's signed permission for a hand-off
messages: all messages between router and workers, and between workers
wire/: the public gRPC API
"""
