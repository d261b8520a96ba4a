"""One request in flight: workers chosen, tokens relayed, attempts repeated after a lost worker."""
