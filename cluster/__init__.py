"""The composition root: configuration, command line, Ray and Ray Serve. Only `cluster` imports Ray.

In reading order:

    config      the YAML file: schema, strict loading, cross-checks
    local       a Ray cluster on this machine, owned by Baton
    scaling     how many workers each pool should have
    membership  the directory: one actor that knows which routers and workers are ready
    models      models on this machine: find, fetch, convert
    bench       the load generator of `baton bench`
    serve       the Ray Serve deployments of routers and workers, and control of them
    client_tls  certificates of the command line, for HTTP and for gRPC
    cli         the command `baton`
    call_timeout  a time limit for calls into Ray that have none
    gc_tuning     garbage-collector settings of serving processes
    ray_private   names of Ray that are not public
"""
