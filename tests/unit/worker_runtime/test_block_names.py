"""Names of blocks are hashed where a request enters, never on the step thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from protocol.errors import Cancelled
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import chain_seed, extend_chain
from protocol.messages import Cancel, Submit
from protocol.sampling import SamplingParams
from protocol.states import WorkerState
from tests.support import decode_bench, prefill_bench
from tests.support.blocks import FINGERPRINT
from tests.support.scheduler_bench import BLOCK
from tests.support.submits import LIMITS
from worker_runtime.config import WorkerConfig
from worker_runtime.control.control_service import ControlService
from worker_runtime.control.grammars import Grammars
from worker_runtime.scheduling import prefix_cache
from worker_runtime.scheduling.messages import Granted, Submitted
from worker_runtime.scheduling.prefix_cache import HASH_SLICE, hash_blocks

LONG = tuple(number % 997 for number in range(3 * HASH_SLICE * BLOCK + 1))


def submit(prompt: tuple[int, ...], output: tuple[int, ...] = (), salt: str = "") -> Submit:
    return Submit(
        key=RequestKey("q"),
        router_id="r",
        prompt_ids=prompt,
        output_ids=output,
        sampling=SamplingParams(max_tokens=BLOCK, ignore_eos=True),
        time_left_s=60.0,
        cache_salt=salt,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, blocks hashed) of every call that hashes."""
    found: list[tuple[str, int]] = []

    def counted(digests: list[bytes], tokens: Any, **settings: Any) -> None:
        before = len(digests)
        extend_chain(digests, tokens, **settings)
        found.append((threading.current_thread().name, len(digests) - before))

    monkeypatch.setattr(prefix_cache, "extend_chain", counted)
    return found


@pytest.fixture
async def control() -> Any:
    layout = structs.replace(LIMITS.layout, num_blocks=1024)
    limits = replace(
        LIMITS,
        layout=layout,
        vocab_size=1000,
        max_model_len=4096,
        capacity=dict.fromkeys(Role, 4096),
    )
    service = ControlService(
        ref=WorkerRef(worker_id="d0", epoch=9, role=Role.DECODE, address="x"),
        limits=limits,
        fingerprint=FINGERPRINT,
        precision="int8",
        config=WorkerConfig(),
        progress=type("Progress", (), {"broken": None})(),
        clock=lambda: 0.0,
        accept=lambda command: accepted.append(command) or 1,
        move=lambda _move: 1,
        role_changed=lambda _role: None,
        grammars=Grammars(None),
        cancel=lambda _cancel: 1,
        router_gone=lambda _router: None,
    )
    accepted: list[Submitted] = []
    service.accepted = accepted
    service.become(WorkerState.READY)
    stream = service.publisher.stream("r")
    await anext(stream)
    yield service
    await stream.aclose()
    service.close()


@pytest.mark.parametrize("salt", ["", "salt"])
@pytest.mark.parametrize("length", [1, BLOCK, 5 * BLOCK + 1, len(LONG)])
def test_names_are_those_of_the_chain(length: int, salt: str) -> None:
    tokens = LONG[:length]
    whole: list[bytes] = []
    extend_chain(whole, tokens, block_size=BLOCK, seed=chain_seed(FINGERPRINT, salt))
    cut = length // 2 + 1
    for request in (submit(tokens, (), salt), submit(tokens[:cut], tokens[cut:], salt)):
        assert hash_blocks(request, FINGERPRINT, BLOCK) == tuple(whole)


async def test_long_prompts_are_hashed_on_a_thread_of_their_own_in_slices(control, calls) -> None:
    await control._on_submit(submit(LONG))
    (command,) = control.accepted
    assert command.digests == hash_blocks(command.submit, FINGERPRINT, BLOCK)
    on_thread = [count for name, count in calls if name.startswith("block-names")]
    assert on_thread == [HASH_SLICE] * 3


async def test_short_prompts_are_hashed_at_once(control, calls) -> None:
    await control._on_submit(submit(LONG[:9]))
    assert calls == [(threading.current_thread().name, 2)]


async def test_a_request_can_be_cancelled_while_it_is_hashed(control, monkeypatch) -> None:
    release = threading.Event()
    control._hasher.submit(release.wait)
    hashing = asyncio.create_task(control._on_submit(submit(LONG)))
    await asyncio.sleep(0)
    await control._on_cancel(Cancel(keys=(RequestKey("q"),)))
    release.set()
    with pytest.raises(Cancelled):
        await hashing
    assert control.accepted == []
    await control._on_submit(submit(LONG))
    assert len(control.accepted) == 1


async def test_two_submits_of_one_request_are_both_passed_on(control) -> None:
    """The scheduler drops the second: a router repeats a call whose answer was lost."""
    await asyncio.gather(*(control._on_submit(submit(LONG)) for _ in range(2)))
    assert len(control.accepted) == 2


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_schedulers_hash_no_block_of_a_prompt(kind: str, calls: list[tuple[str, int]]) -> None:
    """Whatever runs: arrival, admission, chunks, reuse by a second request, the last token."""
    bench: Any = (prefill_bench if kind == "prefill" else decode_bench).Bench(num_blocks=600)
    for name in ("first", "second"):
        request = submit(LONG)
        request = Submit(
            **{field: getattr(request, field) for field in request.__struct_fields__}
            | {"key": RequestKey(name)}
        )
        digests = hash_blocks(request, FINGERPRINT, BLOCK)
        calls.clear()
        bench.tell(Submitted(submit=request, digests=digests))
        if kind == "prefill":
            bench.tell(Granted(key=request.key, num_cached_tokens=0, num_tokens=0))
        while bench.turn():
            pass
        assert sum(count for _, count in calls) <= 1  # a block that output tokens fill
