"""The gRPC door: baton.v1, health and reflection."""
