"""One rank of an engine on a CPU."""
