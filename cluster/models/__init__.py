"""Models on this machine: fetching and converting."""
