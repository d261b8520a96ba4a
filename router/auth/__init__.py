"""Who may call, how fast they are served, and TLS.

keys: API keys and their file; service tiers
tls: certificates of both front ends
"""
