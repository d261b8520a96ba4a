"""The directory: which routers and workers are ready."""
