"""What prefill and decode workers share.

worker: assembles a worker: engine ranks, step thread, control service, hand-offs.
control/: event loop: requests in, event streams out, grammars.
step_loop: step thread: commands in, plan, launch, wait, apply.
scheduling/: pure: requests, in-flight steps, prefix cache, base of both schedulers.
ranks: joins engine ranks to the data planes of kv_transfer and to kv_tiers.
cores, config: CPU cores shared between workers of a machine; settings.
"""
