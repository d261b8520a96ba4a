"""A router in front of workers in this process: both front ends, real hand-offs, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from router.config import RouterConfig
from router.server import Router
from tests.support.pair import SECRET, Pair, running_pair


@dataclass
class Stack:
    """The front_ends' addresses, and everything behind them."""

    http: str
    grpc: str
    router: Router
    pair: Pair


@asynccontextmanager
async def running_stack(
    model_path: str, *, router: dict[str, Any] | None = None, **pair_options: Any
) -> AsyncIterator[Stack]:
    """A ready router over `running_pair(model_path, **pair_options)`."""
    async with running_pair(model_path, **pair_options) as pair:
        settings = {
            "model_path": model_path,
            "served_model_name": "tiny",
            "local_prefill_tokens": 0,
        }
        front_end = Router(RouterConfig(**{**settings, **(router or {})}), secret=SECRET)
        addresses = await front_end.start(
            http_host="127.0.0.1", http_port=0, grpc_host="127.0.0.1", grpc_port=0
        )
        try:
            front_end.set_workers([*pair.prefill_refs, *pair.decode_refs])
            async with asyncio.timeout(60):
                while not front_end.ready:
                    await asyncio.sleep(0.01)
            yield Stack(http=addresses.http, grpc=addresses.grpc, router=front_end, pair=pair)
        finally:
            await front_end.stop()
