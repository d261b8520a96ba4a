"""The real router in a process of its own, over given workers.

Prints its addresses as one line of JSON once it is ready, and serves until its standard input
closes. With `--profile FILE` it writes a profile of its event loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import sys

import uvloop

from benchmarks.front_end.stub_worker import SECRET
from cluster.gc_tuning import freeze_heap
from protocol.ids import Role, WorkerRef
from router.config import RouterConfig
from router.server import Router


def read_refs(text: str) -> list[WorkerRef]:
    """The workers in a line of a stub worker."""
    return [WorkerRef(**{**ref, "role": Role(ref["role"])}) for ref in json.loads(text)]


async def _serve(config: RouterConfig, refs: list[WorkerRef], profile: str) -> None:
    router = Router(config, secret=SECRET)
    where = await router.start(
        http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
    )
    router.set_workers(refs)
    freeze_heap()
    while not router.ready:  # noqa: ASYNC110 - once, at the start
        await asyncio.sleep(0.01)
    print(json.dumps({"http": where.http, "grpc": where.grpc}), flush=True)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    await router.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_end.stub_router")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--workers", required=True, help="the line that the stub workers printed")
    parser.add_argument("--max-requests", type=int, default=1024)
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    config = RouterConfig(
        model_path=options.model_path,
        max_requests=options.max_requests,
        local_prefill_tokens=0,
        admin_enabled=False,
    )
    uvloop.run(_serve(config, read_refs(options.workers), options.profile))


if __name__ == "__main__":
    main()
