"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar, Self

import grpc

from baton_client.calls import Calls, Output, left_s
from baton_client.channel import DETOKENIZE, LIST_MODELS, TOKENIZE
from baton_client.progress import OutputPart, WholeOutput
from baton_client.requests import Message, tokenize_request
from protocol.wire import inference_pb2 as wire


class GenerateStream(Output):
    """One output: iterating yields its parts as they come. As a context it is cancelled at the end
    of the block, and otherwise when it is closed or no longer referred to."""

    _parts: Generator[OutputPart, None, None]

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
                wait_s = self._wait_s(error)
            finally:
                call.cancel()
            time.sleep(wait_s)


class BatonClient(Calls[GenerateStream]):
    """A client of the routers at one address. Safe to use from several threads.

    timeout_s: the time of each call, tries included, unless the call says another. use_proxy:
    whether the proxy that the environment names is used.
    """

    _grpc: ClassVar[Any] = grpc
    _stream: ClassVar[Any] = GenerateStream

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
        request = tokenize_request(prompt, messages, add_special_tokens)
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

    def _context(self) -> int:
        return self.models()[0].max_model_len

    def _unary(self, method: str, request: Any, reply: type[Any], timeout_s: float | None) -> Any:
        deadline, failures = self._deadline(timeout_s), 0
        call, metadata = self._unary_call(method, request, reply)
        while True:
            try:
                return call(request, timeout=left_s(deadline), metadata=metadata)
            except grpc.RpcError as error:
                failures += 1
                wait_s = self._wait_s(error, failures, deadline)
            time.sleep(wait_s)
