"""The client side of TLS, for the command line."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass

from baton_client import TlsFiles
from protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """One set of trusted CAs and client certificate, for HTTP and for gRPC."""

    context: ssl.SSLContext
    files: TlsFiles


def client_tls(options: argparse.Namespace) -> ClientTls | None:
    """TLS as --tls, --tls-ca, --tls-cert and --tls-key describe it; None without them. Raises
    InvalidRequest naming the option whose file does not load."""
    ca, cert, key = (path or "" for path in (options.tls_ca, options.tls_cert, options.tls_key))
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
    return ClientTls(context=context, files=TlsFiles(ca=ca, cert=cert, key=key))
