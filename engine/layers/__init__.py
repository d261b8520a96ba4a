"""Building blocks of a transformer over paged KV, each holding one rank's share of its weights."""
