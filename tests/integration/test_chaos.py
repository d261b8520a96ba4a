"""Load on processes that hand over to each other, while transfers, processes and ranks break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos import run_chaos
from tests.support.chaos_load import chaos_model


@pytest.mark.slow
@pytest.mark.chaos
async def test_nothing_hangs_leaks_or_differs(tmp_path: Path) -> None:
    outcome = await run_chaos(chaos_model(tmp_path), 8.0, seed=1, period_s=0.3, min_events=21)
    assert outcome.wrong == outcome.failed == outcome.left == []
    assert min(outcome.requests, outcome.faults.total()) >= 21
