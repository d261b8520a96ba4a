"""What a service tier promises, from a request to the workers and to the metrics."""

from __future__ import annotations

import asyncio

from observability import metrics
from protocol.errors import Unavailable
from protocol.ids import Role
from router.auth.keys import ServiceTier
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds
from tests.support.stub_workers import StubFleet, StubWorker

BODY = {"prompt": "hello", "max_tokens": 4}
TIERS = {
    "loose": ServiceTier(ttft_s=30.0, tpot_s=30.0, gap_s=30.0),
    "strict": ServiceTier(ttft_s=30.0, gap_s=0.02),
    "free": ServiceTier(weight=0.5),
}


def outcomes(front_ends: FrontEnds, tier: str) -> dict[str, tuple[float, float]]:
    """Requests that kept and missed each promise."""
    counted = {
        promise: tuple(
            front_ends.router.metrics.value(
                metrics.TIER_PROMISES, tier=tier, promise=promise, outcome=outcome
            )
            for outcome in ("kept", "missed")
        )
        for promise in ("ttft", "tpot", "gap", "all")
    }
    return {name: both for name, both in counted.items() if any(both)}


async def post(front_ends: FrontEnds, tier: str, **fields: object) -> int:
    status, _ = await front_ends.post("/v1/completions", BODY | {"service_tier": tier} | fields)
    return status


async def test_a_gap_goes_to_the_workers_and_every_promise_is_counted(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    decode: StubWorker = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, service_tiers=TIERS) as front_ends:
        assert await post(front_ends, "loose") == 200
        assert await post(front_ends, "free") == 200
        decode.delay_s = 0.05
        for n in (1, 2):
            assert await post(front_ends, "strict", n=n, temperature=1.0) == 200
        gaps = [submit.gap_s for submit in decode.submitted]
        assert gaps == [30.0, None, 0.02, 0.02, 0.02]
        loose, free, *strict = (submit.first_s for submit in decode.submitted)
        assert free is None
        assert all(first_s is not None and 0.0 < first_s <= 30.0 for first_s in (loose, *strict))
        assert outcomes(front_ends, "loose") == dict.fromkeys(
            ("ttft", "tpot", "gap", "all"), (1, 0)
        )
        assert outcomes(front_ends, "strict") == {"ttft": (2, 0), "gap": (0, 2), "all": (0, 2)}
        assert outcomes(front_ends, "free") == {}


async def test_the_gap_of_each_choice_counts_by_itself(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    """Tokens of two choices interleave: neither hides a gap of the other."""
    decode = await fleet.add(Role.DECODE, gate=asyncio.Event())
    async with make_front_ends(fleet, service_tiers=TIERS) as front_ends:
        task = asyncio.create_task(post(front_ends, "strict", n=2, temperature=1.0))
        while len(decode.submitted) < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        decode.gate.set()
        assert await task == 200
        assert outcomes(front_ends, "strict")["gap"] == (0, 1)


async def test_failed_requests_missed_and_refused_or_invalid_ones_do_not_count(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    decode = await fleet.add(Role.DECODE, decode_step_s=0.05)
    async with make_front_ends(fleet, service_tiers=TIERS) as front_ends:
        assert await post(front_ends, "strict") == 503
        assert front_ends.router.metrics.value(metrics.REFUSALS, reason="gap") == 1
        assert await post(front_ends, "loose", max_tokens=-1) == 400
        assert outcomes(front_ends, "strict") == outcomes(front_ends, "loose") == {}
        decode.fail_after, decode.fail_error = 2, Unavailable("stub failed")
        decode.fail_retriable = False
        assert await post(front_ends, "loose") == 503
        assert outcomes(front_ends, "loose") == dict.fromkeys(
            ("ttft", "tpot", "gap", "all"), (0, 1)
        )
