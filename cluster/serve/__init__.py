"""Ray Serve deployments of routers and workers."""
