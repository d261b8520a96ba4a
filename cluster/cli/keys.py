"""`baton keys`: create API keys; give a cluster its first key and certificate."""

from __future__ import annotations

import argparse
import datetime
import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from cluster.cli.console import Console
from protocol.errors import InvalidRequest
from router.auth.keys import check_name, hashed, new_key

_OPERATOR = "operator"
_KEY_FILES = ("api-key", "keys.yaml")
_TLS_FILES = ("ca.crt", "tls.crt", "tls.key")
_VALID_DAYS = 5 * 365


def run(options: argparse.Namespace, console: Console) -> None:
    """Print a new key, which is stored nowhere, and its entry for the key file; or fill a folder
    with what a secure cluster needs."""
    if options.action == "secure":
        _secure(Path(options.folder).expanduser(), options.host, console)
        return
    check_name(options.name)
    key = new_key()
    console.say(f"key, shown only now: {key}")
    console.say("entry below `keys:` in the file that router.settings.api_keys_file names:")
    console.say(_entries(options.name, key, admin=options.admin).rstrip())


def _entries(name: str, key: str, *, admin: bool) -> str:
    entry: dict[str, object] = {"name": name, "hash": hashed(key)}
    return yaml.safe_dump([entry | ({"admin": True} if admin else {})], sort_keys=False)


def _secure(folder: Path, hosts: Iterable[str], console: Console) -> None:
    """Make what is missing of: an admin's key (api-key) with its key file, a certificate for these
    hosts and this machine's own names, and the authority that signed it. Files that are there stay.
    Only this user can read them."""
    names = (*_KEY_FILES, *_TLS_FILES)
    present = [name for name in names if (folder / name).exists()]
    for files in (_KEY_FILES, _TLS_FILES):
        if 0 < len(set(files) & set(present)) < len(files):
            lacking = ", ".join(sorted(set(files) - set(present)))
            raise InvalidRequest(f"{folder} has no {lacking}, which goes with the rest: remove it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made: dict[str, bytes] = {}
    if _KEY_FILES[0] not in present:
        key = new_key()
        made["api-key"] = key.encode()
        made["keys.yaml"] = b"keys:\n" + _entries(_OPERATOR, key, admin=True).encode()
    if _TLS_FILES[0] not in present:
        made |= _certificate([*hosts, *_own_names()])
    for name, content in made.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    console.say(f"{folder}: made {', '.join(made)}" if made else f"{folder}: nothing to make")


def _own_names() -> list[str]:
    """This machine's names and addresses, those of the way to other networks included."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            names.append(probe.getsockname()[0])
        except OSError:
            pass  # no way to other networks
    return names


def _certificate(names: Iterable[str]) -> dict[str, bytes]:
    """A certificate for the names, its key, and the authority's certificate. The authority's key is
    kept nowhere: a certificate for other names comes from another authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def signed(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: Any) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("Baton's own authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        for extension in extensions:
            critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_key, own_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    private = own_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # What strict clients want, as Python's own from 3.13 on.
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "digital_signature", "encipher_only", "decipher_only"), False)
    return {
        "ca.crt": signed(
            "Baton's own authority",
            ca_key,
            x509.BasicConstraints(ca=True, path_length=0),
            x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused),
        ),
        "tls.crt": signed(
            "Baton",
            own_key,
            x509.SubjectAlternativeName([_general_name(n) for n in dict.fromkeys(names)]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
        ),
        "tls.key": private,
    }


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
