"""Decides when a request goes to the workers, or that it is refused.

limits: sequences in flight, of the router and of each key
queue: waiting requests and their life cycle up to the first token
load_estimate: how long a request would wait, from the workers' reports (pure)
fair_queue: shares of tokens between callers (pure)
"""
