"""The prefill worker: admission, chunked-prefill scheduler, hand-off. Thin on purpose.

Reading order: entry (a request here), commands (what the scheduler is told and asks for),
scheduler, worker (which ties it to a sender of kv_transfer).
"""
