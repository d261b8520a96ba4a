# Baton for CPUs. In a clone:
#   pip wheel . -w dist --no-deps
#   docker build -f deploy/docker/cpu.Dockerfile -t baton:cpu .
# Without a builder, `make image-steps` runs the same steps.
FROM python:3.12-slim-bookworm AS build
COPY constraints /locks
COPY dist /dist
# Torch's own index has the build for CPUs; everything else is as locked.
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' /locks/cpu.txt)" \
    && pip install --no-cache-dir --no-compile --prefix /install --no-deps \
        --index-url https://download.pytorch.org/whl/cpu "$torch" \
    && PYTHONPATH="$(echo /install/lib/python3*/site-packages)" \
        pip install --no-cache-dir --no-compile --prefix /install -c /locks/cpu.txt \
        "$(ls /dist/baton_llm-*.whl)[models]"

FROM python:3.12-slim-bookworm
# g++ compiles the kernels for bfloat16 where they run; KubeRay's probes call wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home --shell /bin/bash baton
COPY --from=build /install /usr/local
ENV RAY_worker_niceness=0 \
    RAY_grpc_client_keepalive_time_ms=20000 \
    RAY_grpc_client_keepalive_timeout_ms=20000 \
    RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1
USER 1000
WORKDIR /home/baton
EXPOSE 8000 9000
CMD ["baton", "up", "--foreground"]
