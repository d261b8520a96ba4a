"""What must outlive the directory's process: in Ray's own store, under names that only this cluster
has. With GCS fault tolerance it outlives the head node, too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError

from cluster.ray_private import delete_value, get_value, put_value
from protocol.errors import BatonError, Unavailable

_NAMESPACE = b"baton"


class ClusterStore:
    """Values by name. Every method blocks; Unavailable when Ray does not answer."""

    def __init__(self, secret: bytes) -> None:
        self._prefix = hashlib.sha256(secret).hexdigest()[:16].encode()

    def get(self, name: str) -> bytes | None:
        with ray_errors_as_unavailable():
            value: bytes | None = get_value(self._key(name), namespace=_NAMESPACE)
        return value

    def put(self, name: str, value: bytes) -> None:
        with ray_errors_as_unavailable():
            put_value(self._key(name), value, overwrite=True, namespace=_NAMESPACE)

    def clear(self) -> None:
        """Delete every value of this cluster."""
        with ray_errors_as_unavailable():
            delete_value(self._prefix, del_by_prefix=True, namespace=_NAMESPACE)

    def _key(self, name: str) -> bytes:
        return self._prefix + b"-" + name.encode()


@contextmanager
def ray_errors_as_unavailable(what: str = "the cluster") -> Iterator[None]:
    """Raise Unavailable where Ray or `what` does not answer; what an actor refused stays typed."""
    try:
        yield
    except (RayError, ConnectionError, TimeoutError) as error:
        if isinstance(refusal := getattr(error, "cause", None), BatonError):
            raise refusal from None
        raise Unavailable(f"{what} does not answer: {type(error).__name__}") from error
