"""The configuration file: schema, loading, cross-checks."""
