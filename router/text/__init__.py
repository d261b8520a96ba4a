"""Text on this side of the router, token ids on the other."""
