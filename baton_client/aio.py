"""The asynchronous client: as the synchronous one, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

from grpc import aio

from baton_client.channel import (
    DETOKENIZE,
    GENERATE,
    LIST_MODELS,
    TOKENIZE,
    TlsFiles,
    call_metadata,
    channel_options,
)
from baton_client.deadlines import deadline_in, fits, left_s
from baton_client.errors import call_error
from baton_client.progress import OutputPart, Progress, Retry, WholeOutput
from baton_client.requests import Message, Options, Prompt, chat_message, generate_request
from protocol.wire import inference_pb2 as wire

R = TypeVar("R")


class AsyncBatonClient:
    """A client of the routers at one address. For one event loop.

    timeout_s: the time of each call, tries included, unless the call says another. use_proxy:
    whether the proxy that the environment names is used.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: TlsFiles | None = None,
        retry: Retry | None = None,
        timeout_s: float | None = None,
        use_proxy: bool = False,
    ) -> None:
        self.address = address
        self._api_key = api_key
        self._retry = retry or Retry()
        self._timeout_s = timeout_s
        options = channel_options(use_proxy=use_proxy)
        if tls is None:
            self._channel = aio.insecure_channel(address, options)
        else:
            self._channel = aio.secure_channel(address, tls.credentials(), options)
        self._generate: Any = self._channel.unary_stream(
            GENERATE,
            request_serializer=wire.GenerateRequest.SerializeToString,
            response_deserializer=wire.GenerateResponse.FromString,
        )

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        resume: bool = True,
        **options: Unpack[Options],
    ) -> AsyncGenerateStream:
        """Start a request: iterate over the result for its parts, or call `answer`.

        A stream that breaks goes on where it stopped, unless `resume` is false or the options do
        not allow it; then it raises CallError.
        """
        progress = Progress(
            generate_request(prompt, messages, options), retry=self._retry, resume=resume
        )
        metadata = call_metadata(self._api_key, request_id)
        return AsyncGenerateStream(
            progress,
            start=lambda request, left_s: self._generate(
                request, timeout=left_s, metadata=metadata
            ),
            context=self._context,
            deadline=self._deadline(timeout_s),
            address=self.address,
        )

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
        request = wire.TokenizeRequest(add_special_tokens=add_special_tokens)
        if messages is not None:
            request.chat.CopyFrom(chat_message(messages))
        elif prompt is not None:
            request.prompt = prompt
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

    def _deadline(self, timeout_s: float | None) -> float | None:
        return deadline_in(self._timeout_s if timeout_s is None else timeout_s)

    async def _unary(
        self, method: str, request: Any, kind: type[Any], timeout_s: float | None
    ) -> Any:
        deadline, failures = self._deadline(timeout_s), 0
        call: Any = self._channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        while True:
            metadata = call_metadata(self._api_key, "")
            try:
                return await call(request, timeout=left_s(deadline), metadata=metadata)
            except aio.AioRpcError as error:
                failures += 1
                failure = call_error(error, self.address)
                wait_s = self._retry.delay_s(failures, failure)
                if wait_s is None or not fits(wait_s, deadline):
                    raise failure from error
            await asyncio.sleep(wait_s)


class AsyncGenerateStream:
    """One output: iterating yields its parts as they come. As a context it is cancelled at the end
    of the block, and otherwise when it is closed or no longer referred to."""

    def __init__(
        self,
        progress: Progress,
        *,
        start: Callable[[wire.GenerateRequest, float | None], Any],
        context: Callable[[], Awaitable[int]],
        deadline: float | None,
        address: str,
    ) -> None:
        self._progress = progress
        self._start = start
        self._context = context
        self._deadline = deadline
        self._address = address
        self._parts = self._run()

    @property
    def so_far(self) -> WholeOutput:
        """The output so far."""
        return self._progress.answer

    @property
    def request_id(self) -> str:
        """The request's id, once there is a part."""
        return self._progress.request_id

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
                failure = call_error(error, self._address)
                if progress.ended():  # only the usage is missing
                    return
                wait_s = progress.retry_after_s(failure)
                if wait_s is None or not fits(wait_s, self._deadline):
                    raise failure from error
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)
