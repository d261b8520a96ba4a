"""Channels: their options, and TLS."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc

GENERATE = "/baton.v1.Inference/Generate"
LIST_MODELS = "/baton.v1.Inference/ListModels"
TOKENIZE = "/baton.v1.Inference/Tokenize"
DETOKENIZE = "/baton.v1.Inference/Detokenize"
_KEEPALIVE_MS = 10_000
#: A router that stops cancels calls that reach it meanwhile (grpc/grpc#41785); routers themselves
#: name another status. gRPC sends such a call again, to the router that listens now (gRFC A6).
_RETRY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["CANCELLED"],
}
_SERVICE_CONFIG = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _RETRY}]})
#: A larger request is not sent again.
_RETRY_BUFFER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files in PEM: trusted certificates (the system's when empty), and the client's own."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError when a file cannot be read."""
        pems = (
            Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.cert)
        )
        return grpc.ssl_channel_credentials(*pems)


def channel_options(*, use_proxy: bool = False) -> list[tuple[str, int | str]]:
    return [
        # By default all channels of a process share one connection, and with it one router.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(use_proxy)),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
        # A router's host that vanishes ends the stream instead of holding it until the deadline.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ]


def call_metadata(api_key: str, request_id: str = "") -> tuple[tuple[str, str], ...]:
    pairs = (("authorization", api_key and f"Bearer {api_key}"), ("x-request-id", request_id))
    return tuple((name, value) for name, value in pairs if value)
