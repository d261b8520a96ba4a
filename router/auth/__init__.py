"""API keys, TLS and service tiers."""
