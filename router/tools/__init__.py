"""Tool calls: what clients ask for, how models write calls, and reading them out of a text."""
