"""The composition root, the only package that imports Ray: config, CLI, deployments, scaling."""
