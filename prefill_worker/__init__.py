"""The prefill worker: chunked prefill, token 1, hand-off to decode.

lifecycle: states of a request, commands and outputs.
scheduler: chunks of prompts under a token budget.
worker: joins the scheduler to the sender of kv_transfer.
"""
