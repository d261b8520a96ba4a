"""The composition root, and the only package that knows Ray.

To read in this order:

    config, config_load, config_tree, checks  what the user says, read strictly and cross-checked
    cli/                                      the command `baton`, one file a subcommand
    local_ray, head                           a Ray of our own on this machine
    deployments, builders                     the Serve applications (for cli.up, or `serve deploy`)
    worker_replica, ranks, router_replica     what runs in Serve's replicas
    directory, membership, watching           who is there: one small actor that all follow
    serve_control, admin                      scaling and draining what runs

Beside it: models and gguf_convert (models on this machine), client (of the gRPC door, for cli/),
home and heap.
"""
