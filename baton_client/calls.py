"""What the two clients have in common: a channel, deadlines, and when a call is tried again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, Unpack

from baton_client.channel import GENERATE, TlsFiles, call_metadata, channel_options
from baton_client.errors import call_error
from baton_client.progress import Progress, Retry, WholeOutput
from baton_client.requests import Message, Options, Prompt, generate_request
from protocol.wire import inference_pb2 as wire

S = TypeVar("S")


class Calls(ABC, Generic[S]):
    """A client of the routers at one address; S is its stream of one output.

    timeout_s: the time of each call, tries included, unless the call says another. use_proxy:
    whether the proxy that the environment names is used.
    """

    _grpc: ClassVar[Any]  # the module that makes channels: grpc or grpc.aio
    _stream: ClassVar[Any]

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
        self._channel: Any = (
            self._grpc.insecure_channel(address, options)
            if tls is None
            else self._grpc.secure_channel(address, tls.credentials(), options)
        )
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
    ) -> S:
        """Start a request: iterate over the result for its parts, or call `answer`.

        A stream that breaks goes on where it stopped, unless `resume` is false or the options do
        not allow it; then it raises CallError.
        """
        request = generate_request(prompt, messages, options)
        metadata = call_metadata(self._api_key, request_id)
        stream: S = self._stream(
            Progress(request, retry=self._retry, resume=resume),
            start=lambda rest, left_s: self._generate(rest, timeout=left_s, metadata=metadata),
            context=self._context,
            deadline=self._deadline(timeout_s),
            address=self.address,
        )
        return stream

    @abstractmethod
    def _context(self) -> Any:
        """The tokens that the served model's context holds."""

    def _deadline(self, timeout_s: float | None) -> float | None:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _unary_call(self, method: str, request: Any, reply: type[Any]) -> tuple[Any, Any]:
        """The call of a method, and its metadata."""
        call = self._channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return call, call_metadata(self._api_key)

    def _wait_s(self, error: Exception, failures: int, deadline: float | None) -> float:
        """Seconds until a call that failed so often is tried again; raises CallError when it is
        not."""
        failure = call_error(error, self.address)
        wait_s = self._retry.delay_s(failures, failure)
        if wait_s is None or not fits(wait_s, deadline):
            raise failure from error
        return wait_s


class Output(ABC):
    """One output over any number of calls, which the two streams read."""

    def __init__(
        self,
        progress: Progress,
        *,
        start: Callable[[wire.GenerateRequest, float | None], Any],
        context: Callable[[], Any],
        deadline: float | None,
        address: str,
    ) -> None:
        self._progress = progress
        self._start = start
        self._context = context
        self._deadline = deadline
        self._address = address
        self._parts: Any = self._run()

    @abstractmethod
    def _run(self) -> Any:
        """Generate the parts."""

    @property
    def so_far(self) -> WholeOutput:
        """The output so far."""
        return self._progress.answer

    @property
    def request_id(self) -> str:
        """The request's id, once there is a part."""
        return self._progress.request_id

    def _wait_s(self, error: Exception) -> float:
        """Seconds until the next call after one that failed, 0 if only the usage is missing; raises
        CallError when there is no next call."""
        if self._progress.ended():
            return 0.0
        failure = call_error(error, self._address)
        wait_s = self._progress.retry_after_s(failure)
        if wait_s is None or not fits(wait_s, self._deadline):
            raise failure from error
        return wait_s


def left_s(deadline: float | None) -> float | None:
    """Seconds until a deadline on the monotonic clock; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def fits(wait_s: float, deadline: float | None) -> bool:
    """Whether a wait ends before the deadline."""
    return deadline is None or time.monotonic() + wait_s < deadline
