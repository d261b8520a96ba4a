"""The prefill role: chunked prefill, token 1, hand-off to decode.

lifecycle: states of a request.
expected: when prompts that wait should be computed.
scheduler: chunks of prompts under a token budget.
"""
