"""What must hold after a replay, read from the routers' metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from cluster.bench.http_stream import HttpClientConnection
from cluster.bench.measure import Result

_IDLE_S = 10.0
_LOOK_S = 0.25

_GIVEN_BACK = "baton_prompts_given_back_total"
_ENDED = "baton_worker_requests_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold."""

    what: str
    seen: str
    ok: bool


class Figures:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return sum(value for _, value in self._matching(name, labels))

    def by(self, label: str, name: str, **labels: str) -> Counter[str]:
        """The same, apart for each value of one more label."""
        found: Counter[str] = Counter()
        for own, value in self._matching(name, labels):
            found[own[label]] += int(value)
        return found

    @property
    def busy(self) -> float:
        """Requests in progress and blocks in use; 0 when idle."""
        blocks = sum(
            self.total("baton_kv_blocks", state=state) for state in ("held", "quarantined")
        )
        requests = (
            self.total(f"baton_{whose}requests_{state}")
            for whose in ("num_", "worker_")
            for state in ("running", "waiting")
        )
        return blocks + sum(requests)

    def _matching(
        self, name: str, labels: dict[str, str]
    ) -> Iterator[tuple[dict[str, str], float]]:
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.labels, sample.value


async def until_idle(http: str) -> Figures:
    """The metrics once nothing is held, or as they are after a while."""
    connection = HttpClientConnection(f"http://{http}")
    deadline = time.monotonic() + _IDLE_S
    try:
        while True:
            answer = await connection.get("/metrics", timeout_s=5)
            figures = Figures(answer.body.decode())
            if not figures.busy or time.monotonic() > deadline:
                return figures
            await asyncio.sleep(_LOOK_S)
    finally:
        connection.close()


def checks_of(
    results: Sequence[Result], before: Figures, after: Figures, *, scaled: bool = False
) -> Iterator[Check]:
    """Everything that must hold once all `results` are in. `scaled`: workers may have left, and
    their counts with them."""
    whole = sum(not result.error for result in results)
    yield Check(
        what="requests that completed with exactly the requested tokens",
        seen=f"{whole} of {len(results)}",
        ok=whole == len(results),
    )
    yield _handoffs(len(results), before, after, scaled)
    for what, name in (
        ("hand-offs that failed", "baton_handoff_failures_total"),
        ("links made again", "baton_handoff_relinks_total"),
        ("attempts submitted again", "baton_request_resumes_total"),
        ("typed errors to clients", "baton_request_failures_total"),
    ):
        count = after.total(name) - before.total(name)
        yield Check(what=what, seen=f"{count:.0f}", ok=count == 0)
    blocks = after.by("state", "baton_kv_blocks")
    yield Check(
        what="requests in progress and blocks in use when idle",
        seen=f"{after.busy:.0f} (blocks: {_listed(blocks)})",
        ok=after.busy == 0,
    )


def _handoffs(requests: int, before: Figures, after: Figures, scaled: bool) -> Check:
    """Every request was handed off with its KV, or prefilled on decode for a counted reason; those
    that were given back before that, or moved after it (or ended on the way), so often more."""
    name = "baton_handoff_bytes_total"
    moved = after.total(name, role="prefill") - before.total(name, role="prefill")
    handed = after.by("outcome", "baton_handoffs_total", role="decode")
    handed.subtract(before.by("outcome", "baton_handoffs_total", role="decode"))
    local = after.by("reason", "baton_local_prefills_total")
    local.subtract(before.by("reason", "baton_local_prefills_total"))
    given_back = after.total(_GIVEN_BACK) - before.total(_GIVEN_BACK)
    moves = after.total(_ENDED, outcome="moved") - before.total(_ENDED, outcome="moved")
    counted = handed.total() + local.total() - given_back - moves
    cut_short = handed["released"] if moves else 0
    complete = counted - cut_short <= requests <= counted and (moved > 0) == (handed.total() > 0)
    return Check(
        what="hand-offs by outcome, their KV; prompts on decode by reason; given back; moves",
        seen=f"{_listed(+handed) or 'none'}, {moved / 1e9:.1f} GB; {_listed(+local) or 'none'}; "
        f"{given_back:.0f} given back; {moves:.0f} moves",
        ok=complete or (scaled and counted <= requests),
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
