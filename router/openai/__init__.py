"""The OpenAI-style HTTP door: JSON and server-sent events."""
