# Baton for NVIDIA GPUs: torch brings CUDA 13, the machine its driver (580 or newer). In a clone:
#   pip wheel . -w dist --no-deps
#   docker build -f deploy/docker/gpu.Dockerfile -t baton .
FROM python:3.12-slim-bookworm AS build
COPY constraints /locks
COPY dist /dist
RUN pip install --no-cache-dir --no-compile --prefix /install -c /locks/cpu.txt -c /locks/gpu.txt \
        "$(ls /dist/baton_llm-*.whl)[models,gpu]"

FROM python:3.12-slim-bookworm
# gcc is for triton, with Python's headers, which the base has; KubeRay's probes call wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home --shell /bin/bash baton
COPY --from=build /install /usr/local
# The container runtime mounts the driver.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    RAY_worker_niceness=0 \
    RAY_grpc_client_keepalive_time_ms=20000 \
    RAY_grpc_client_keepalive_timeout_ms=20000 \
    RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1
USER 1000
WORKDIR /home/baton
EXPOSE 8000 9000
CMD ["baton", "up", "gpu-1p1d", "--foreground"]
