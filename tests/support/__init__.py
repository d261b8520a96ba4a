"""Stand-ins shared by tests."""
