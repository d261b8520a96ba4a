"""The certificates of the command line: how it calls a router over TLS."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """The same trust and certificate for both doors."""

    context: ssl.SSLContext
    credentials: grpc.ChannelCredentials


def client_tls(options: argparse.Namespace) -> ClientTls | None:
    """What --tls, --tls-ca, --tls-cert and --tls-key ask for; None without them. Raises
    InvalidRequest naming the one whose file does not load."""
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if bool(cert) != bool(key):
        raise InvalidRequest("--tls-cert and --tls-key go together", param="--tls-cert")
    if not (options.tls or ca or cert):
        return None
    # What is wrong with a file is told by ssl; gRPC finds no router then, or aborts.
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
