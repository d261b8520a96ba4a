"""The decode worker: block reservation, continuous-batching scheduler, token outlet. Thin on
purpose.

Reading order: entry (a request here), commands (what the scheduler is told and asks for), admission
(who gets blocks), scheduler, worker (which ties it to a receiver of kv_transfer).
"""
