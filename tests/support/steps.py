"""Requests through scheduler and step loop of a decode worker, on any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from decode_worker.scheduler import DecodeScheduler
from engine.executor import Executor
from engine.kv.allocator import BlockAllocator
from observability.clock import steady_clock
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from tests.support.invariants import check_blocks
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.messages import Snapshot, StepOutput, Submitted
from worker_runtime.step_loop import Inbox, StepLoop


async def served(
    executor: Executor,
    layout: KVLayout,
    fingerprint: KVFingerprint,
    requests: Sequence[tuple[list[int], SamplingParams]],
) -> tuple[list[list[int]], int]:
    """The output of each request, and how many preemptions there were; no block is left behind."""
    blocks = BlockAllocator(layout.num_blocks, layout.block_size, layout.groups)
    config = WorkerConfig(max_num_seqs=6, max_num_batched_tokens=24, watermark=0.0)
    prefill, decode = (
        scheduler(config=config, blocks=blocks, fingerprint=fingerprint, place="d0")
        for scheduler in (PrefillScheduler, DecodeScheduler)
    )
    outputs: dict[str, list[int]] = {}
    done = asyncio.Event()

    def deliver(out: StepOutput, snapshot: Snapshot, _accepted: int) -> None:
        for event in (e for events in out.events.values() for e in events.tokens):
            tokens = outputs.setdefault(event.key.request_id, [])
            assert event.index == len(tokens)
            tokens.append(event.token)
        if snapshot.num_unfinished == 0 and len(outputs) == len(requests):
            done.set()

    inbox: Inbox[Any] = Inbox()
    for i, (ids, sampling) in enumerate(requests):
        submit = Submit(
            key=RequestKey(str(i)),
            router_id="r",
            prompt_ids=tuple(ids),
            sampling=sampling,
            time_left_s=600.0,
        )
        inbox.put(Submitted(submit=submit))
    here = asyncio.get_running_loop()
    loop: StepLoop = StepLoop(
        name="steps",
        scheduler=BothRoles({Role.PREFILL: prefill, Role.DECODE: decode}, blocks, Role.DECODE),
        deliver=lambda *turn: here.call_soon_threadsafe(deliver, *turn),
        executor=executor,
        inbox=inbox,
        clock=steady_clock(),
    )
    loop.start()
    async with asyncio.timeout(60):
        while not done.is_set() and loop.broken is None:
            await asyncio.sleep(0.01)
    assert loop.broken is None
    assert await asyncio.to_thread(loop.stop)
    assert loop.broken is None
    check_blocks(blocks)
    assert blocks.num_available == layout.num_blocks
    return [outputs[str(i)] for i in range(len(requests))], decode.num_preemptions
