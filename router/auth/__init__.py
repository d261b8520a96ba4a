"""Who may call, how fast they are served, and TLS.

keys: API keys and their file
tiers: latency targets and weights of service tiers
tls: certificates of both front ends
"""
