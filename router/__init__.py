"""Serves HTTP and gRPC clients: text, admission, choice of workers, resumed outputs.

Wings in the order that a request meets them; an import contract holds the layers:

    server        one router: front ends, followed workers, start and stop
    openai, grpc  the front ends
    anthropic, responses  other APIs over HTTP, translated to chat
    request       typed requests and their checks
    auth          API keys, service tiers, TLS
    service       one implementation of every operation, for both front ends
    served_model  the model's names, its text work in threads, grammars of outputs
    text          tokens to text and back, chat templates, tool calls
    admission     limits, the queue, and who goes next
    workers       one client per worker; the account of outstanding work; the choice of a pair
    dispatch      a request in flight: outputs, attempts, retries, telemetry

Beside the path: config, errors, offload (long JSON in threads), admin (views of the cluster),
fingerprint, pages (chat and API in a browser).
"""
