"""TLS of both front ends: one certificate, renewed in place when its files change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from observability.logging import get_logger
from router.auth.keys import Stamp, stamp

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Certificates of the front ends, PEM files on every machine that runs a router.

    cert_file, key_file: of the server; without them there is no TLS. client_ca_file: if set,
        clients must present a certificate that it signed (mutual TLS), probes included.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        if self.cert_file and not self.key_file:
            raise ValueError("key_file is required beside cert_file")
        for name in ("key_file", "client_ca_file"):
            if getattr(self, name) and not self.cert_file:
                raise ValueError(f"cert_file is required beside {name}")

    @property
    def enabled(self) -> bool:
        return bool(self.cert_file)


class Tls:
    """The certificates in force. Raises ValueError, naming the field, for files that do not load.

    `context` is for the HTTP server, None without TLS. New connections use a renewed certificate
    and key within about a second; the client CA is read once.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self.context: ssl.SSLContext | None = None
        self._stamps: tuple[Stamp, Stamp] | None = None
        self._client_ca: bytes | None = None
        self._for_grpc: grpc.ServerCertificateConfiguration | None = None
        if config.enabled:
            for name in ("cert_file", "key_file", "client_ca_file"):
                _check_readable(name, getattr(config, name))
            self._stamps = self._look()
            self.context = self._load()

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """For the gRPC server; None without TLS."""
        if self._for_grpc is None:
            return None
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._renewed)
        first, self._for_grpc = self._for_grpc, None
        return grpc.dynamic_ssl_server_credentials(
            first,
            fetch,
            require_client_authentication=self._client_ca is not None,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The renewed certificate since the last call, which gRPC makes before each handshake."""
        renewed, self._for_grpc = self._for_grpc, None
        return renewed

    async def refresh(self) -> None:
        """Reload the certificate if it has changed; until it loads, the old one stays."""
        if self.context is None:
            return
        try:
            stamps = await asyncio.to_thread(self._look)
            if stamps == self._stamps:
                return
            self._stamps = stamps
            await asyncio.to_thread(self._load)
            self.context.load_cert_chain(self._config.cert_file, self._config.key_file)
        except (OSError, ValueError) as error:
            log.error("reloading the certificate failed", extra={"error": str(error)})
        else:
            log.info("certificate renewed")

    def _look(self) -> tuple[Stamp, Stamp]:
        return stamp(Path(self._config.cert_file)), stamp(Path(self._config.key_file))

    def _load(self) -> ssl.SSLContext:
        """A new context from the files; sets the configuration for gRPC."""
        config = self._config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(config.cert_file, config.key_file)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls.cert_file {config.cert_file}: does not load with tls.key_file "
                f"{config.key_file}: {error.reason or error}"
            ) from None
        if config.client_ca_file:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(config.client_ca_file)
            except ssl.SSLError as error:
                raise ValueError(
                    f"tls.client_ca_file {config.client_ca_file}: {error.reason or error}"
                ) from None
            self._client_ca = self._client_ca or Path(config.client_ca_file).read_bytes()
        pair = (Path(config.key_file).read_bytes(), Path(config.cert_file).read_bytes())
        self._for_grpc = grpc.ssl_server_certificate_configuration([pair], self._client_ca)
        return context


def _check_readable(name: str, path: str) -> None:
    try:
        if path:
            Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"tls.{name} {path}: cannot be read: {error.strerror}") from None
