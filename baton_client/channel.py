"""Channels: their options, and TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

GENERATE = "/baton.v1.Inference/Generate"
LIST_MODELS = "/baton.v1.Inference/ListModels"
TOKENIZE = "/baton.v1.Inference/Tokenize"
DETOKENIZE = "/baton.v1.Inference/Detokenize"
_KEEPALIVE_MS = 10_000


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


def channel_options(*, use_proxy: bool = False) -> list[tuple[str, int]]:
    return [
        # By default all channels of a process share one connection, and with it one router.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(use_proxy)),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A router's host that vanishes ends the stream instead of holding it until the deadline.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ]


def call_metadata(api_key: str, request_id: str = "") -> tuple[tuple[str, str], ...]:
    pairs = (("authorization", api_key and f"Bearer {api_key}"), ("x-request-id", request_id))
    return tuple((name, value) for name, value in pairs if value)
