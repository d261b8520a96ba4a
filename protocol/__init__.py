"""Values that all processes of a cluster share: no torch, no ray, no I/O.

message: base class of every value that crosses between processes
codec: messages to bytes and back, strictly
errors: every failure that a caller can see, and its HTTP and gRPC status
ids: requests, attempts, workers and their epochs
states: life cycles and their transition tables
sampling: how tokens are chosen, grammars, log-probabilities
timeline: spans of a request, trace context
kv_layout: the shape of a worker's KV, cells that two workers share, names of blocks by content
loads: parts of what workers and routers report of their load
messages: all messages between router and workers, and between workers; tickets
loans: messages about KV that one worker has and another needs
stored_responses: what routers ask each other about responses that clients may continue
wire/: the public gRPC API
"""
