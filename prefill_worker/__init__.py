"""The prefill role: chunked prefill, token 1, hand-off to decode.

lifecycle: states of a request.
scheduler: chunks of prompts under a token budget.
"""
