"""A client of a cluster in which routers die (tests.cluster.chaos)."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING

import grpc

from protocol.wire import inference_pb2 as wire
from tests.support import services
from tests.support.chaos_load import LoadRequest

if TYPE_CHECKING:
    from tests.cluster.chaos import Chaos

REQUEST_S = 600.0


async def get_cluster(channel: grpc.aio.Channel) -> wire.Cluster:
    """The cluster as the router at the other end sees it, which lists itself first."""
    return await services.AdminStub(channel).GetCluster(wire.GetClusterRequest(), timeout=20)


class Client:
    """Asks one router after the other; tells when its tokens came."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        #: Since the epoch: of each request the times of its messages.
        self.arrivals: dict[str, array[float]] = {}

    async def run(self) -> None:
        """Until the run is over, over one connection after the other."""
        while not self._chaos.over:
            async with self._chaos.channel() as channel:
                await self._use(channel)

    async def _use(self, channel: grpc.aio.Channel) -> None:
        """Ask the router that a connection has reached, until it fails."""
        chaos, outcome, name = self._chaos, self._chaos.outcome, ""
        while not chaos.over:
            try:
                if not name:
                    name = (await get_cluster(channel)).routers[0].router_id
                sent = chaos.random.choice(list(chaos.expected))
                ids = await self.ask(channel, sent)
            except grpc.aio.AioRpcError as error:
                if name:
                    chaos.failed(name, f"{error.code().name}: {error.details()}")
                await asyncio.sleep(1.0)
                return
            outcome.requests += 1
            outcome.tokens += len(ids)
            if ids != chaos.expected[sent]:
                outcome.wrong.append(f"{sent}: {ids}")

    async def ask(self, channel: grpc.aio.Channel, sent: LoadRequest) -> list[int]:
        """The ids of one request, streamed."""
        ids: list[int] = []
        times: array[float] = array("d")
        stream = services.InferenceStub(channel).Generate(sent.message(), timeout=REQUEST_S)
        async for message in stream:
            times.append(time.time())
            if message.id:
                self.arrivals[message.id] = times
            for choice in message.choices:
                ids.extend(choice.token_ids)
        return ids
