"""API keys and service tiers: who may call, what each may do, how fast it is served. A file holds
hashes of keys, never keys.

A key is 256 random bits, so its plain SHA-256 cannot be inverted; a slow hash would slow down every
call. Keys are looked up by an HMAC with a nonce of this process, so that the time of a comparison
reveals nothing (double HMAC,
https://www.nccgroup.com/us/research-blog/double-hmac-verification/).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from observability.logging import get_logger
from protocol.errors import InvalidRequest, PermissionDenied, Unauthenticated, invalid_field

log = get_logger(__name__)

#: Differs after any change of a file, mounted secrets included.
Stamp = tuple[int, int, int]
_PREFIX = "baton-"
_HASH = "sha256:"
_SECRET_BYTES = 32
_BEARER = "bearer "
_KeyHash = Annotated[str, Meta(pattern="^(?i:sha256:[0-9a-f]{64})$")]
_Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who a call comes from, and what it may do; a limit of None means no limit.

    admin: may see and change the cluster. service_tier: of requests that name none. weight: share
    of a busy cluster against other callers. max_requests: sequences in flight. max_queued_tokens:
    prompt tokens of its waiting requests. requests_per_minute: accepted in any 60 s. models: names
    of the models it may use; empty: all. Each router enforces its `share` of the limits.
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
        if not self.admin:
            raise PermissionDenied(f"the API key {self.name!r} has no admin right")

    def may_use(self, names: frozenset[str]) -> bool:
        return not self.models or bool(self.models & names)


def share(limit: int | None, num_routers: int) -> int | None:
    """One router's share of a key's limit, rounded up."""
    return None if limit is None else -(-limit // num_routers)


#: The caller where no keys are configured.
ANYONE = Caller(admin=True)


class Keyring:
    """The keys of one file."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._nonce = secrets.token_bytes(_SECRET_BYTES)
        self._callers = {self._tag(digest): caller for digest, caller in callers.items()}

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, authorization: str | None) -> Caller:
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


class KeyFile:
    """Identifies callers by the keys in a file, reloaded when it changes. Without a file every
    caller may do everything."""

    def __init__(self, path: str, *, tiers: frozenset[str] = frozenset()) -> None:
        self._path = Path(path) if path else None
        self._tiers = tiers
        self._keys: Keyring | None = None
        self._stamp: Stamp | None = None
        if self._path is not None:
            try:
                self._stamp = stamp(self._path)
                self._keys = load_keys(self._path, tiers=tiers)
            except OSError as error:
                raise ValueError(f"api_keys_file {path}: {error.strerror}") from None
            except ValueError as error:
                raise ValueError(f"api_keys_file {error}") from None

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header. Raises Unauthenticated."""
        return ANYONE if self._keys is None else self._keys.caller(authorization)

    async def refresh(self) -> None:
        """Reload the file if it has changed; if it does not load, the old keys stay."""
        if self._path is None:
            return
        try:
            now = await asyncio.to_thread(stamp, self._path)
            if now == self._stamp:
                return
            self._stamp = now
            self._keys = await asyncio.to_thread(load_keys, self._path, tiers=self._tiers)
        except (OSError, ValueError) as error:
            log.error("the API keys are not reloaded", extra={"error": str(error)})
        else:
            log.info("API keys reloaded", extra={"keys": len(self._keys)})


def new_key() -> str:
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
    """The keys in a YAML file. Raises ValueError naming the field, never a hash."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"{path}: is not valid YAML") from None
    try:
        return Keyring(_callers(msgspec.convert(tree, _File).keys, tiers))
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {invalid_field(error).message}") from None
    except InvalidRequest as error:
        raise ValueError(f"{path}: {error.message}") from None


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key in the file; several hashes while it is being replaced."""

    name: str
    hash: _KeyHash | list[_KeyHash]
    admin: bool | None = None
    service_tier: str | None = None
    weight: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_requests: _Count | None = None
    max_queued_tokens: _Count | None = None
    requests_per_minute: _Count | None = None
    models: list[str] | None = None


class _File(msgspec.Struct):
    keys: list[_Entry]


def _callers(entries: Sequence[_Entry], tiers: frozenset[str]) -> dict[str, Caller]:
    callers: dict[str, Caller] = {}
    names: set[str] = set()
    for i, entry in enumerate(entries):
        try:
            caller = _caller(entry, tiers)
        except InvalidRequest as error:
            raise InvalidRequest(f"keys[{i}].{error.message}") from None
        hashes = [entry.hash] if isinstance(entry.hash, str) else entry.hash
        digests = [text.lower().removeprefix(_HASH) for text in hashes]
        if caller.name in names or callers.keys() & set(digests):
            raise InvalidRequest(f"keys[{i}]: name and hash must differ from all others")
        names.add(caller.name)
        callers |= dict.fromkeys(digests, caller)
    return callers


def _caller(entry: _Entry, tiers: frozenset[str]) -> Caller:
    check_name(entry.name)
    tier = entry.service_tier or ""
    if tier and tier not in tiers:
        raise InvalidRequest(f"service_tier: no tier {tier!r} is configured")
    return Caller(
        name=entry.name,
        admin=entry.admin or False,
        service_tier=tier,
        weight=1.0 if entry.weight is None else entry.weight,
        max_requests=entry.max_requests,
        max_queued_tokens=entry.max_queued_tokens,
        requests_per_minute=entry.requests_per_minute,
        models=frozenset(entry.models or ()),
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def stamp(path: Path) -> Stamp:
    """Identifies a file's present content. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


#: The tier of requests that name none; it need not be configured.
DEFAULT_TIER = "default"
#: Values of OpenAI's clients that name no tier.
_UNNAMED = (None, "auto", DEFAULT_TIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTier:
    """Targets of one class of requests; a request that cannot meet them is refused at once.

    ttft_s: seconds to the first token. tpot_s: seconds per token after it. gap_s: the longest
    time between two tokens, which decode keeps its steps below. None: no target.
    weight: share of a busy cluster, times the weight of the caller's key.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def promises(self) -> dict[str, float]:
        """The targets by name: ttft, tpot, gap."""
        targets = {"ttft": self.ttft_s, "tpot": self.tpot_s, "gap": self.gap_s}
        return {name: seconds for name, seconds in targets.items() if seconds is not None}


def tier_name(requested: str | None, caller: Caller, tiers: Mapping[str, ServiceTier]) -> str:
    """The tier of a request. Raises InvalidRequest for an unknown tier, PermissionDenied for one
    that is not the caller's."""
    if requested in _UNNAMED:
        return caller.service_tier or DEFAULT_TIER
    assert requested is not None
    if requested not in tiers:
        known = ", ".join(["auto", DEFAULT_TIER, *(name for name in tiers if name not in _UNNAMED)])
        raise InvalidRequest(
            f"service_tier must be one of {known}, got {requested!r}", param="service_tier"
        )
    if caller.service_tier not in ("", requested):
        raise PermissionDenied(
            f"the API key {caller.name!r} has the service tier {caller.service_tier!r}",
            param="service_tier",
        )
    return requested
