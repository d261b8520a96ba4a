"""A synchronous gRPC client of a router, and the client side of TLS, for the command line."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protocol.errors import STATUSES, BatonError, ErrorCode, ErrorInfo, InvalidRequest
from protocol.wire import inference_pb2 as wire

Fields = Mapping[str, Any]
_GENERATE = "/baton.v1.Inference/Generate"


@dataclass(slots=True, kw_only=True)
class GenerateOutcome:
    """The result of a stream besides its text; complete once the stream has ended."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    timeline: wire.Timeline | None = None


class InferenceClient:
    """A client of one router. Raises the typed errors that the router sends.

    use_proxy: whether the proxy that the environment names (`https_proxy`, ...) is used.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        use_proxy: bool = False,
    ) -> None:
        self.address = address
        options = [
            # By default all channels of a process share one connection, and with it one router.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", int(use_proxy)),
        ]
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        self._start: Any = self._channel.unary_stream(
            _GENERATE,
            request_serializer=wire.GenerateRequest.SerializeToString,
            response_deserializer=wire.GenerateResponse.FromString,
        )

    def complete(self, prompt: str, fields: Fields, outcome: GenerateOutcome) -> Iterator[str]:
        """Stream the text that continues `prompt` and fill in `outcome`. `fields` are further
        fields of the request."""
        return self._generate(wire.GenerateRequest(prompt=prompt, **fields), outcome)

    def chat(
        self, messages: Sequence[wire.Message], fields: Fields, outcome: GenerateOutcome
    ) -> Iterator[str]:
        """Stream the answer to a conversation, like `complete`."""
        chat = wire.Chat(messages=messages)
        return self._generate(wire.GenerateRequest(chat=chat, **fields), outcome)

    def close(self) -> None:
        """Close the connection, which cancels running streams."""
        self._channel.close()

    def _generate(self, request: wire.GenerateRequest, outcome: GenerateOutcome) -> Iterator[str]:
        try:
            call = self._start(request, metadata=self._metadata)
            try:
                for message in call:
                    yield from _take(message, outcome)
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise _typed(error, self.address, began=bool(outcome.token_ids)) from error


def _take(message: wire.GenerateResponse, outcome: GenerateOutcome) -> Iterator[str]:
    for choice in message.choices:
        outcome.token_ids.extend(choice.token_ids)
        if choice.HasField("finish_reason"):
            outcome.finish_reason = choice.finish_reason
        if choice.text:
            yield choice.text
    if message.HasField("usage"):
        outcome.prompt_tokens = message.usage.prompt_tokens
        outcome.completion_tokens = message.usage.completion_tokens
    if message.HasField("timeline"):
        outcome.timeline = message.timeline


def _typed(error: Any, address: str, *, began: bool) -> BatonError:
    """The error that the router named in its trailers, else one with the same gRPC status."""
    trailers = dict(error.trailing_metadata() or ())
    status = error.code().name
    code = trailers.get("baton-error-code")
    if code not in list(ErrorCode):
        codes = [known for known, means in STATUSES.items() if means.grpc == status]
        code = codes[0] if codes else ErrorCode.INTERNAL
    text = error.details() or status
    if status == "UNAVAILABLE" and "baton-error-code" not in trailers:
        text = (
            f"the router at {address} closed the connection"
            if began
            else f"no router answers at {address} over gRPC: {text.rpartition('last error: ')[2]}"
            " (if it wants TLS: --tls or --tls-ca)"
        )
    info = ErrorInfo(code=ErrorCode(code), message=text, param=trailers.get("baton-error-param"))
    return info.to_error()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """One set of trusted CAs and client certificate, for HTTP and for gRPC."""

    context: ssl.SSLContext
    credentials: grpc.ChannelCredentials


def client_tls(options: argparse.Namespace) -> ClientTls | None:
    """TLS as --tls, --tls-ca, --tls-cert and --tls-key describe it; None without them. Raises
    InvalidRequest naming the option whose file does not load."""
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if bool(cert) != bool(key):
        raise InvalidRequest("--tls-cert and --tls-key go together", param="--tls-cert")
    if not (options.tls or ca or cert):
        return None
    # ssl names the fault of a file; gRPC would report an unreachable router, or abort.
    context, files = ssl.create_default_context(), f"--tls-ca {ca}"
    try:
        if ca:
            context.load_verify_locations(ca)
        if cert:
            files = f"--tls-cert {cert} with --tls-key {key}"
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidRequest(f"{files}: {error.strerror}", param=files.split()[0]) from None
    pems = (Path(path).read_bytes() if path else None for path in (ca, key, cert))
    return ClientTls(context=context, credentials=grpc.ssl_channel_credentials(*pems))
