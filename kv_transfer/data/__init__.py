"""Every rank's threads: data plane, link threads, rank commands."""
