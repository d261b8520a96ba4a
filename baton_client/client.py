"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

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


class BatonClient:
    """A client of the routers at one address. Safe to use from several threads.

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
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options)
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
    ) -> GenerateStream:
        """Start a request: iterate over the result for its parts, or call `answer`.

        A stream that breaks goes on where it stopped, unless `resume` is false or the options do
        not allow it; then it raises CallError.
        """
        progress = Progress(
            generate_request(prompt, messages, options), retry=self._retry, resume=resume
        )
        metadata = call_metadata(self._api_key, request_id)
        return GenerateStream(
            progress,
            start=lambda request, left_s: self._generate(
                request, timeout=left_s, metadata=metadata
            ),
            context=lambda: self.models()[0].max_model_len,
            deadline=self._deadline(timeout_s),
            address=self.address,
        )

    def models(self, *, timeout_s: float | None = None) -> list[wire.Model]:
        """The models served here."""
        reply: wire.ListModelsResponse = self._unary(
            LIST_MODELS, wire.ListModelsRequest(), wire.ListModelsResponse, timeout_s
        )
        return list(reply.models)

    def tokenize(
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
        reply: wire.TokenizeResponse = self._unary(
            TOKENIZE, request, wire.TokenizeResponse, timeout_s
        )
        return list(reply.tokens)

    def detokenize(self, tokens: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids, special tokens included."""
        request = wire.DetokenizeRequest(tokens=tokens)
        reply: wire.DetokenizeResponse = self._unary(
            DETOKENIZE, request, wire.DetokenizeResponse, timeout_s
        )
        return reply.prompt

    def close(self) -> None:
        """Close the connection, which cancels running streams."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout_s: float | None) -> float | None:
        return deadline_in(self._timeout_s if timeout_s is None else timeout_s)

    def _unary(self, method: str, request: Any, kind: type[Any], timeout_s: float | None) -> Any:
        deadline, failures = self._deadline(timeout_s), 0
        call: Any = self._channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        while True:
            metadata = call_metadata(self._api_key, "")
            try:
                return call(request, timeout=left_s(deadline), metadata=metadata)
            except grpc.RpcError as error:
                failures += 1
                failure = call_error(error, self.address)
                wait_s = self._retry.delay_s(failures, failure)
                if wait_s is None or not fits(wait_s, deadline):
                    raise failure from error
            time.sleep(wait_s)


class GenerateStream:
    """One output: iterating yields its parts as they come. As a context it is cancelled at the end
    of the block, and otherwise when it is closed or no longer referred to."""

    def __init__(
        self,
        progress: Progress,
        *,
        start: Callable[[wire.GenerateRequest, float | None], Any],
        context: Callable[[], int],
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

    def answer(self) -> WholeOutput:
        """Read to the end; the whole output."""
        for _ in self._parts:
            pass
        return self._progress.answer

    def close(self) -> None:
        """Cancel what is not read."""
        self._parts.close()

    def __iter__(self) -> Iterator[OutputPart]:
        return self._parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[OutputPart, None, None]:
        progress = self._progress
        while not progress.ended():
            context = self._context() if progress.needs_context else 0
            call = self._start(progress.next_request(context), left_s(self._deadline))
            try:
                for message in call:
                    yield from progress.take(message)
                return
            except grpc.RpcError as error:
                failure = call_error(error, self._address)
                if progress.ended():  # only the usage is missing
                    return
                wait_s = progress.retry_after_s(failure)
                if wait_s is None or not fits(wait_s, self._deadline):
                    raise failure from error
            finally:
                call.cancel()
            time.sleep(wait_s)
