"""The front door: text and HTTP or gRPC outside, token ids and workers inside. No torch, no ray.

To read in this order; each is called by those above it:

    server                      one router: makes and runs all of this (for cluster.serve.router_replica)
    openai/app, grpc/inference  the two doors: what clients say in, what they are told out
    request                     the one request model that both read into (with fields, messages,
                                structured, tools/request, unserved)
    service                     every operation, for both doors: admission, deadlines, metrics
    model, forms, prepare       text to ids, grammars tried, the sequences to run (with text/)
    waiting                     whose turn it is (with admission, fair_queue, pressure, tiers, keys)
    generation, choice          one request in flight, each of its outputs and their text
    relay, attempt              one output over any number of attempts: choose, submit, resume
    policy                      which pair of workers (with prefix: what they have cached)
    members, member             the workers, each followed over its event stream (with reservations,
                                silence)

Beside the path: access and tls (files that may change), spans and metering (what is told of a
request afterwards), admin (what is needed of whoever runs the cluster).
"""
