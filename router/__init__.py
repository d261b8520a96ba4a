"""The router: text and HTTP or gRPC outside, token ids and workers inside. No torch, no ray."""
