"""The real router behind Ray Serve's own proxies, to measure what that ingress costs.

Started like `stub_router`; prints where the proxies listen and which processes tokens pass through.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import gRPCOptions
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.stub_router import read_refs
from benchmarks.stub_worker import SECRET
from cluster.heap import settle_heap
from protocol.wire import inference_pb2 as pb
from router.config import RouterConfig
from router.keys import ANYONE
from router.server import Router

_ADD_SERVICE = "protocol.wire.inference_pb2_grpc.add_InferenceServicer_to_server"
#: Where a replica keeps its router's application: Serve copies what the ingress is made of, globals
#: too, but there is one sys.modules.
_PLACE = "benchmarks.stub_serve.application"


async def _forward(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):  # startup, shutdown
            await send({"type": (await receive())["type"] + ".complete"})
        return
    application: Any = sys.modules[_PLACE]
    await application(scope, receive, send)


def _application() -> ASGIApp:
    """Serve calls this before the replica exists, and with it the router."""
    return _forward


class _Context:
    """What the servicer writes to, turned into an iterator."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue()

    async def write(self, message: pb.GenerateResponse) -> None:
        await self.messages.put(message)

    def time_remaining(self) -> None:
        """No deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
@serve.ingress(_application)
class Behind:
    """A router in a replica; its own doors are open too, but nobody is told where."""

    async def __init__(self, model_path: str, workers: str) -> None:  # type: ignore[misc]
        config = RouterConfig(model_path=model_path, local_prefill_tokens=0, admin_enabled=False)
        self._router = router = Router(config, secret=SECRET)
        await router.start(http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0)
        router.set_workers(read_refs(workers))
        while not router.ready:  # noqa: ASYNC110 - once, at the start
            await asyncio.sleep(0.01)
        sys.modules[_PLACE] = router._http._config.app  # type: ignore[assignment]  # noqa: SLF001
        self._servicer = router._grpc._inference  # noqa: SLF001
        settle_heap()

    async def Generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """As the gRPC proxy calls it."""
        context: Any = _Context()

        async def run() -> None:
            await self._servicer.generate(request, context, ANYONE)
            await context.messages.put(None)

        task = asyncio.create_task(run())
        while (message := await context.messages.get()) is not None:
            yield message
        await task


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serving_pids() -> list[int]:
    """The proxy and the replica."""
    names = (b"ray::ProxyActor", b"ray::ServeReplica:default:Behind")
    lines = {line.parent.name: line.read_bytes() for line in Path("/proc").glob("[0-9]*/cmdline")}
    return [int(pid) for pid, line in lines.items() if line.startswith(names)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stub_serve")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--workers", required=True)
    options, _ = parser.parse_known_args()
    logging.getLogger().setLevel(logging.ERROR)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name Ray reads
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    http, grpc = _free_port(), _free_port()
    serve.start(
        http_options={"host": "127.0.0.1", "port": http},
        grpc_options=gRPCOptions(port=grpc, grpc_servicer_functions=[_ADD_SERVICE]),
    )
    # From the module by its name: what is in __main__ would be copied into the replica.
    behind = importlib.import_module("benchmarks.stub_serve").Behind
    serve.run(behind.bind(options.model_path, options.workers), route_prefix="/")
    where = {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc}", "pids": _serving_pids()}
    print(json.dumps(where), flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
