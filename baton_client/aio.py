"""The asynchronous client: as the synchronous one, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, ClassVar, Self

from grpc import aio

from baton_client.calls import Calls, Output, left_s
from baton_client.channel import DETOKENIZE, LIST_MODELS, TOKENIZE
from baton_client.progress import OutputPart, WholeOutput
from baton_client.requests import Message, tokenize_request
from protocol.wire import inference_pb2 as wire


class AsyncGenerateStream(Output):
    """One output: iterating yields its parts as they come. As a context it is cancelled at the end
    of the block, and otherwise when it is closed or no longer referred to."""

    _parts: AsyncGenerator[OutputPart, None]

    async def answer(self) -> WholeOutput:
        """Read to the end; the whole output."""
        async for _ in self._parts:
            pass
        return self._progress.answer

    async def close(self) -> None:
        """Cancel what is not read."""
        await self._parts.aclose()

    def __aiter__(self) -> AsyncIterator[OutputPart]:
        return self._parts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> AsyncGenerator[OutputPart, None]:
        progress = self._progress
        while not progress.ended():
            context = await self._context() if progress.needs_context else 0
            call = self._start(progress.next_request(context), left_s(self._deadline))
            try:
                async for message in call:
                    for part in progress.take(message):
                        yield part
                return
            except aio.AioRpcError as error:
                wait_s = self._wait_s(error)
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)


class AsyncBatonClient(Calls[AsyncGenerateStream]):
    """A client of the routers at one address. For one event loop.

    timeout_s: the time of each call, tries included, unless the call says another. use_proxy:
    whether the proxy that the environment names is used.
    """

    _grpc: ClassVar[Any] = aio
    _stream: ClassVar[Any] = AsyncGenerateStream

    async def models(self, *, timeout_s: float | None = None) -> list[wire.Model]:
        """The models served here."""
        reply: wire.ListModelsResponse = await self._unary(
            LIST_MODELS, wire.ListModelsRequest(), wire.ListModelsResponse, timeout_s
        )
        return list(reply.models)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a chat through the model's template."""
        request = tokenize_request(prompt, messages, add_special_tokens)
        reply: wire.TokenizeResponse = await self._unary(
            TOKENIZE, request, wire.TokenizeResponse, timeout_s
        )
        return list(reply.tokens)

    async def detokenize(self, tokens: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids, special tokens included."""
        request = wire.DetokenizeRequest(tokens=tokens)
        reply: wire.DetokenizeResponse = await self._unary(
            DETOKENIZE, request, wire.DetokenizeResponse, timeout_s
        )
        return reply.prompt

    async def close(self) -> None:
        """Close the connection, which cancels running streams."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _context(self) -> int:
        return (await self.models())[0].max_model_len

    async def _unary(
        self, method: str, request: Any, reply: type[Any], timeout_s: float | None
    ) -> Any:
        deadline, failures = self._deadline(timeout_s), 0
        call, metadata = self._unary_call(method, request, reply)
        while True:
            try:
                return await call(request, timeout=left_s(deadline), metadata=metadata)
            except aio.AioRpcError as error:
                failures += 1
                wait_s = self._wait_s(error, failures, deadline)
            await asyncio.sleep(wait_s)
