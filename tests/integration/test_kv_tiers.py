"""Host memory and files below the pools of real workers: the same ids, less computed, also by the
next process, and whatever happens to the files."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from kv_tiers import disk, rank_tiers
from kv_tiers.commands import Copy
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import RankTiers
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from tests.support.families import save_family
from tests.support.local_engine import LocalEngine
from tests.support.pair import SMALL_STEPS, Answer, Pair, running_pair
from tests.support.prompts import random_ids
from tests.support.sources import ROOT
from worker_runtime.scheduling import kv_tiers
from worker_runtime.scheduling.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HOST = "kv_tier_hit_tokens_total{tier=host}"
FAILED = "kv_tier_failures_total{tier=disk,cause=failed}"
DISK = "kv_tier_hit_tokens_total{tier=disk}"
Check = Callable[[list[int], list[int]], None]


@pytest.fixture
def check(model: str) -> Check:
    """Compares an answer with the engine alone."""
    local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))

    def compare(prompt: list[int], ids: list[int]) -> None:
        assert ids == local.generate([(prompt, GREEDY)])[0]

    return compare


@pytest.fixture
def loads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing takes a second a token for the rule that chooses, and no load is late, however slow
    the copies are on a busy machine."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda _self, start, end: float(end - start))
    monkeypatch.setattr(kv_tiers, "patience_s", lambda _load_s: 60.0)


def total(pair: Pair, key: str) -> int:
    return sum(w.status().counters.get(key, 0) for w in (*pair.prefills, *pair.decodes))


async def converse(pair: Pair, check: Check, *, local: bool, turns: int = 3) -> list[Answer]:
    """Six conversations in turn; their history is a multiple of what the pools hold."""
    histories = [random_ids(40, seed=i) for i in range(6)]
    answers = []
    for turn in range(turns):
        for i, history in enumerate(histories):
            history += random_ids(9, seed=100 * turn + i)
            answer = await pair.generate(history, GREEDY, local=local)
            check(history, answer.ids())
            history += answer.ids()
            answers.append(answer)
            await pair.stored()
    return answers


@pytest.mark.usefixtures("loads_pay")
@pytest.mark.parametrize("local", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_conversations_that_do_not_fit_the_pool_come_from_host_memory(
    model: str, check: Check, local: bool, tp: int
) -> None:
    async with running_pair(
        model,
        prefill_blocks=10,
        decode_blocks=10,
        prefill_config=SMALL_STEPS,
        decode_config=SMALL_STEPS,
        prefill_tp=tp,
        decode_tp=tp,
    ) as pair:
        answers = await converse(pair, check, local=local)
        assert [a.cached for a in answers[:6]] == [0] * 6
        # What ran before, in whole blocks.
        assert [a.cached for a in answers[6:]] == [48] * 6 + [64] * 6
        assert total(pair, HOST) == sum(a.cached or 0 for a in answers)
        spans = [s for s in answers[-1].spans if s.phase is Phase.KV_LOAD]
        assert not local or [s.counts for s in spans] == [{"host_tokens": 64}]


@pytest.mark.usefixtures("loads_pay")
@pytest.mark.parametrize(("family", "num_blocks"), [("gemma3", 40), ("mistral-window", 10)])
async def test_windows_come_from_host_memory_with_what_they_see(
    tmp_path: Path, family: str, num_blocks: int
) -> None:
    path = save_family(family, tmp_path)
    local = LocalEngine(EngineConfig(model_path=path, dtype="float32", num_blocks=128))

    def check(prompt: list[int], ids: list[int]) -> None:
        assert ids == local.generate([(prompt, GREEDY)])[0]

    small: Any = {"prefill_blocks": num_blocks, "decode_blocks": num_blocks}
    async with running_pair(
        path, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS, **small
    ) as pair:
        for is_local in (True, False):
            answers = await converse(pair, check, local=is_local, turns=2)
            assert sum(answer.cached or 0 for answer in answers[6:]) >= 6 * 32
        assert total(pair, HOST) >= 6 * 32


async def test_a_disk_that_is_too_slow_is_not_read(
    model: str, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TierConfig(host_bytes=1 << 20, disk_path=str(tmp_path), segment_tokens=16)
    prompt = random_ids(100)
    async with running_pair(model, tiers=tiers) as pair:
        await pair.generate(prompt, GREEDY, local=True)
        await pair.stored()
    real = disk._read_all

    def throttled(file: int, part: memoryview) -> bool:
        time.sleep(len(part) / 20_000)
        return real(file, part)

    monkeypatch.setattr(disk, "_read_all", throttled)
    async with running_pair(model, tiers=tiers, decode_config=SMALL_STEPS) as pair:
        for seed in range(1, 7):  # how long computing takes
            await pair.generate(random_ids(100, seed=seed), GREEDY, local=True)
        answer = await pair.generate(prompt, GREEDY, local=True)
        check(prompt, answer.ids())
        assert answer.cached == 0
        reasons = {
            reason: total(pair, f"kv_tier_refusals_total{{tier=disk,reason={reason}}}")
            for reason in ("cost", "late", "hangs")
        }
        assert reasons == {"cost": 1, "late": 0, "hangs": 0}


@pytest.mark.usefixtures("loads_pay")
async def test_the_next_process_finds_files_and_damaged_ones_are_computed_again(
    model: str, check: Check, tmp_path: Path
) -> None:
    tiers = TierConfig(host_bytes=1 << 20, disk_path=str(tmp_path), segment_tokens=16)
    prompt = random_ids(100)
    async with running_pair(model, tiers=tiers) as pair:
        check(prompt, (await pair.generate(prompt, GREEDY, local=True)).ids())
        await pair.stored()
    files = sorted(tmp_path.rglob("*.kv"))  # noqa: ASYNC240
    assert len(files) == 6
    async with running_pair(model, tiers=tiers) as pair:  # another worker, through prefill
        answer = await pair.generate(prompt, GREEDY)
        check(prompt, answer.ids())
        assert answer.cached == 96
        assert total(pair, DISK) == 96
    for i, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[-1 - 300 * i] ^= 1
        path.write_bytes(content[: -1 if i == 5 else None])
    async with running_pair(model, tiers=tiers) as pair:
        answer = await pair.generate(prompt, GREEDY, local=True)
        check(prompt, answer.ids())
        assert answer.cached == 0
        assert total(pair, "kv_tier_failures_total{tier=disk,cause=damaged}") >= 1


@pytest.mark.parametrize("fault", ["deleted", "read-only", "full", "hangs"])
async def test_a_disk_that_fails_costs_no_request(
    model: str,
    check: Check,
    tmp_path: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does it fill the log."""
    monkeypatch.setattr(rank_tiers, "_LOG_EVERY_S", math.inf)
    root = tmp_path / "kv"
    tiers = TierConfig(host_bytes=1 << 20, disk_path=str(root), segment_tokens=16)
    async with running_pair(model, tiers=tiers) as pair:
        await pair.generate(random_ids(100), GREEDY, local=True)
        await pair.stored()
    freed = asyncio.Event()
    async with running_pair(model, tiers=tiers) as pair:
        if fault == "deleted":
            for path in [*root.rglob("*.kv"), *root.iterdir(), root]:
                path.unlink() if path.suffix else path.rmdir()
        elif fault == "read-only":
            monkeypatch.setattr("kv_tiers.disk.os.open", _refuse)
        elif fault == "full":
            monkeypatch.setattr("kv_tiers.disk._write_all", _no_room)
        else:
            loop = asyncio.get_running_loop()
            real = RankTiers._move_file

            def late(self: RankTiers, copy: Copy, memory: object) -> bool:
                asyncio.run_coroutine_threadsafe(freed.wait(), loop).result()
                return real(self, copy, memory)  # type: ignore[arg-type]

            monkeypatch.setattr(RankTiers, "_move_file", late)
        for seed in (0, 0, 1):
            prompt = random_ids(100, seed=seed)
            check(prompt, (await pair.generate(prompt, GREEDY, local=True)).ids())
        freed.set()
        await pair.stored()
        async with asyncio.timeout(60):  # counts come with the next report
            while fault in ("read-only", "full") and total(pair, FAILED) < 4:
                await asyncio.sleep(0.01)
    failed = Counter(str(vars(r)["copy"]) for r in caplog.records if "copy failed" in r.message)
    assert max(failed.values(), default=0) <= 2  # of each kind one a worker


def _refuse(*_: object) -> int:
    raise PermissionError("read-only")


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


async def test_without_host_memory_workers_serve_as_before(
    model: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(rank_tiers, "HostMemory", refuse)
    async with running_pair(model, prefill_blocks=10, decode_blocks=10) as pair:
        answers = await converse(pair, check, local=False, turns=2)
        assert total(pair, HOST) == 0
        assert len(answers) == 12


_WORKERS = """
import asyncio, sys
from kv_tiers.config import TierConfig
from tests.integration.test_kv_tiers import GREEDY
from tests.support.pair import running_pair
from tests.support.prompts import random_ids

async def main(model, folder):
    tiers = TierConfig(host_bytes=1 << 20, disk_path=folder, segment_tokens=16)
    async with running_pair(model, tiers=tiers) as pair:
        await pair.generate(random_ids(100), GREEDY, local=True)
        await pair.stored()
        print("stored", flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.usefixtures("loads_pay")
async def test_files_survive_a_process_that_is_killed(
    model: str, check: Check, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _WORKERS, model, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(250):
        assert await process.stdout.readline() == b"stored\n"
    process.kill()
    await process.wait()
    tiers = TierConfig(host_bytes=1 << 20, disk_path=str(tmp_path), segment_tokens=16)
    async with running_pair(model, tiers=tiers) as pair:
        answer = await pair.generate(random_ids(100), GREEDY, local=True)
        check(random_ids(100), answer.ids())
        assert answer.cached == 96
        assert total(pair, DISK) == 96
