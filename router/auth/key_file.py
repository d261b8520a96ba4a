"""Who is calling: the keys in force, read again whenever their file changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from observability.logging import get_logger
from router.auth.keys import ANYONE, Caller, Keyring, load_keys

log = get_logger(__name__)

#: Differs after any change that a writer or a mounted secret makes.
Stamp = tuple[int, int, int]


class KeyFile:
    """Tells callers by their key. Without a key file everybody may do everything."""

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
        """Take the file again if it has changed. One that does not load changes nothing: the keys
        in force stay, and the log says why."""
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


def stamp(path: Path) -> Stamp:
    """What the file is now. Raises OSError when it cannot be told."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
