"""Asks both front ends for the same thing: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import httpx

from protocol.wire import inference_pb2 as wire
from tests.support import services


class FrontEnds:
    """Clients of one router, to be used on one event loop."""

    def __init__(self, http: str, grpc_address: str, model: str) -> None:
        self._model = model
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._stub = services.InferenceStub(self._channel)
        self.http = httpx.AsyncClient(base_url=f"http://{http}", timeout=300)

    async def over_grpc(self, prompt: Sequence[int], max_tokens: int, **fields: float) -> list[int]:
        """The output ids of a streamed gRPC request that ignores ends of sequence."""
        request = wire.GenerateRequest(
            model=self._model,
            prompt_token_ids=wire.TokenIds(ids=prompt),
            max_tokens=max_tokens,
            ignore_eos=True,
            **fields,
        )
        ids: list[int] = []
        async for message in self._stub.Generate(request, timeout=300):
            for choice in message.choices:
                ids.extend(choice.token_ids)
        return ids

    async def over_http(self, prompt: Sequence[int], max_tokens: int, **fields: float) -> list[int]:
        """The same over HTTP, not streamed."""
        answer = await self.completion(prompt, max_tokens, **fields)
        return list(answer["choices"][0]["token_ids"])

    async def completion(
        self, prompt: Sequence[int], max_tokens: int, **fields: float | str
    ) -> dict[str, Any]:
        """The whole answer of the same request over HTTP."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    async def close(self) -> None:
        await self.http.aclose()
        await self._channel.close()
