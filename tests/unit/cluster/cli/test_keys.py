"""`baton keys secure`: what a secure cluster needs."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import pytest

from cluster.cli import EXIT_USAGE, main
from router.auth.keys import load_keys


def test_what_a_secure_cluster_needs_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key opens the key file; a client that trusts the authority accepts the certificate."""
    folder = tmp_path / "secrets"
    command = ["keys", "secure", str(folder), "--host", "llm.example.com", "--host", "10.0.0.10"]
    assert main(command) == 0
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(files) == ["api-key", "ca.crt", "keys.yaml", "tls.crt", "tls.key"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    known = load_keys(folder / "keys.yaml", tiers=frozenset())
    caller = known.caller(f"Bearer {files['api-key'].decode()}")
    assert (caller.name, caller.admin) == ("operator", True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # as from Python 3.13 on
    for host in ("llm.example.com", "10.0.0.10", "127.0.0.1", "localhost"):
        _shake_hands(server, client, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake_hands(server, client, "other.example.com")
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("nothing to make\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    (folder / "tls.key").unlink()
    assert main(command) == EXIT_USAGE
    assert "has no tls.key" in capsys.readouterr().err


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
