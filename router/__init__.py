"""The front door: OpenAI HTTP and gRPC, text, admission, pair choice, relay, resume."""
