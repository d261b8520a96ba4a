"""Service tiers: latency targets and weights of classes of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.errors import InvalidRequest, PermissionDenied
from router.auth.keys import Caller

#: The tier of requests that name none; it need not be configured.
DEFAULT_TIER = "default"
#: Values of OpenAI's clients that name no tier.
_UNNAMED = (None, "auto", DEFAULT_TIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTier:
    """Targets of one class of requests; a request that cannot meet them is refused at once.

    ttft_s: seconds to the first token. tpot_s: seconds per token after it. None: no target.
    weight: share of a busy cluster, times the weight of the caller's key.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


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
