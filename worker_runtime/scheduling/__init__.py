"""The base of both schedulers: pure, owned by the step thread.

messages: commands into a scheduler, events and requests out of it.
sequence: tokens, blocks and progress of one request.
prefix_cache: shares full KV blocks between requests.
kv_tiers: what is copied between the pool, host memory and files, and when.
kv_copies: the copies in flight.
kv_prefetch: KV from host memory before a sequence starts, for models of several KV groups.
peer_blocks: KV that workers lend each other.
inflight_steps: steps launched and not yet landed.
scheduler: requests of a worker, deadlines, cancellation, events.
both_roles: the schedulers of both roles on one engine.
"""
