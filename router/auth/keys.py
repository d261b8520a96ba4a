"""API keys: who may call, and what each may do. A file holds their hashes, never a key itself.

A key is 256 random bits, so a plain SHA-256 of it cannot be guessed back; a slow hash would only
slow down every call. What a caller sends is hashed and looked up under a random number of this
process (double HMAC, https://www.nccgroup.com/us/research-blog/double-hmac-verification/), so that
the time of a comparison says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from protocol.errors import InvalidRequest, PermissionDenied, Unauthenticated
from router.request import fields as read

_PREFIX = "baton-"
_HASH = "sha256:"
_SECRET_BYTES = 32
_BEARER = "bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who a call comes from, and what it may do; a limit of None is none.

    admin: whether it may see and steer the cluster. service_tier: class of its requests that name
    none. weight: its share of a busy cluster against other callers. max_requests: sequences in
    flight. max_queued_tokens: prompt tokens of its waiting requests. requests_per_minute: accepted
    in any 60 s. models: names of the models it may use; empty: all. Of each limit a router
    gives its share (see `share`).
    """

    name: str = ""
    admin: bool = False
    service_tier: str = ""
    weight: float = 1.0
    max_requests: int | None = None
    max_queued_tokens: int | None = None
    requests_per_minute: int | None = None
    models: frozenset[str] = frozenset()

    def check_admin(self) -> None:
        """Raise PermissionDenied unless it may steer the cluster."""
        if not self.admin:
            raise PermissionDenied(f"the API key {self.name!r} has no admin right")

    def may_use(self, names: frozenset[str]) -> bool:
        """Whether it may use the model that has these names."""
        return not self.models or bool(self.models & names)


def share(limit: int | None, num_routers: int) -> int | None:
    """One router's part of what a key may have in the cluster, rounded up."""
    return None if limit is None else -(-limit // num_routers)


#: Everybody, where no keys are configured.
ANYONE = Caller(admin=True)


class Keyring:
    """The keys of one file."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._nonce = secrets.token_bytes(_SECRET_BYTES)
        self._callers = {self._tag(digest): caller for digest, caller in callers.items()}

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header. Raises Unauthenticated."""
        if not authorization:
            raise Unauthenticated("an API key is required: send `Authorization: Bearer KEY`")
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the Authorization header must be `Bearer KEY`")
        key = authorization[len(_BEARER) :].strip()
        caller = self._callers.get(self._tag(_digest(key)))
        if caller is None:
            raise Unauthenticated("the API key is not valid")
        return caller

    def _tag(self, digest: str) -> bytes:
        return hmac.digest(self._nonce, digest.encode(), "sha256")


def new_key() -> str:
    """A fresh key."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hashed(key: str) -> str:
    """A key as the file holds it: `sha256:` and 64 hexadecimal digits."""
    return _HASH + _digest(key)


def check_name(name: str) -> None:
    """Raise InvalidRequest unless logs and metrics can show it."""
    if not name.isprintable() or name != name.strip() or not name:
        raise InvalidRequest(
            f"name must be printable characters without spaces around them, got {name!r}",
            param="name",
        )


def load_keys(path: Path, *, tiers: frozenset[str]) -> Keyring:
    """The keys in a YAML file. Raises ValueError naming what is wrong, never what a hash is."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"{path}: is not valid YAML") from None
    try:
        return Keyring(_callers(tree, tiers))
    except InvalidRequest as error:
        raise ValueError(f"{path}: {error.message}") from None


def _callers(tree: object, tiers: frozenset[str]) -> dict[str, Caller]:
    entries = read.as_array(read.as_object(tree, "the file").get("keys"), "keys")
    callers: dict[str, Caller] = {}
    names: set[str] = set()
    for i, item in enumerate(entries):
        entry = read.as_object(item, f"keys[{i}]")
        try:
            caller = _caller(entry, tiers)
            digests = _digests(entry.get("hash"))
        except InvalidRequest as error:
            raise InvalidRequest(f"keys[{i}].{error.message}") from None
        if caller.name in names or callers.keys() & set(digests):
            raise InvalidRequest(f"keys[{i}]: name and hash must differ from all others")
        names.add(caller.name)
        callers |= dict.fromkeys(digests, caller)
    return callers


def _caller(entry: Mapping[str, Any], tiers: frozenset[str]) -> Caller:
    for name in entry:
        if name != "hash" and name not in Caller.__dataclass_fields__:
            raise InvalidRequest(f"{name}: no such field")
    label = read.text(entry, "name")
    if label is None:
        raise InvalidRequest("name is required")
    check_name(label)
    tier = read.text(entry, "service_tier") or ""
    if tier and tier not in tiers:
        raise InvalidRequest(f"service_tier: no class {tier!r} is configured")
    models = read.as_array(entry.get("models") or [], "models")
    return Caller(
        name=label,
        admin=read.boolean(entry, "admin") or False,
        service_tier=tier,
        weight=_weight(read.number(entry, "weight")),
        max_requests=_positive(entry, "max_requests"),
        max_queued_tokens=_positive(entry, "max_queued_tokens"),
        requests_per_minute=_positive(entry, "requests_per_minute"),
        models=frozenset(read.as_text(model, "models") for model in models),
    )


def _digests(value: object) -> Sequence[str]:
    """One hash, or several while a key is being replaced."""
    digests = []
    for item in value if isinstance(value, list) else [value]:
        text = read.as_text(item, "hash").lower()
        digest = text.removeprefix(_HASH)
        if digest == text or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise InvalidRequest("hash must be sha256: and 64 hexadecimal digits")
        digests.append(digest)
    return digests


def _weight(value: float | None) -> float:
    if value is not None and value <= 0:
        raise InvalidRequest(f"weight must be positive, got {value}")
    return 1.0 if value is None else value


def _positive(entry: Mapping[str, Any], name: str) -> int | None:
    value = read.integer(entry, name)
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {value}")
    return value


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
