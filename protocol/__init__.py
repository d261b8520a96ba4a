"""What every process of a Baton cluster agrees on. Pure values: no torch, no ray, no I/O.

Reading order: ids, messages, states; then what messages carry (sampling, grammar, kv_layout,
ticket, prefix, logprobs, timeline, trace), errors, and how all of it travels (codec). wire/ is the
public gRPC API.
"""
