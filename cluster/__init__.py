"""The composition root and the only package that imports Ray: config, CLI, Serve deployments, scaling."""
