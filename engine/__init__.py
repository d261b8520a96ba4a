"""The model, its paged KV and the executor that runs steps. Knows no text, network or roles."""
