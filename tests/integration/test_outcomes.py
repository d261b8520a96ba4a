"""A thousand requests, some invalid, some cancelled: every counter adds up, and nothing stays."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import grpc
import httpx

from observability import metrics
from protocol.errors import ErrorCode
from protocol.ids import Role
from protocol.wire import inference_pb2 as wire
from router.dispatch.attempt import AttemptOutcome
from tests.support import services
from tests.support.stack import Stack, running_stack
from tests.support.tiny import save_tiny_llama
from tests.support.tiny_text import write_model_text
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.messages import CANCELLED, FAILED, FINISHED, RELEASED
from worker_runtime.worker import Worker

NUM_REQUESTS, NUM_INVALID, NUM_CANCELLED = 1000, 100, 300
AT_ONCE = 64
CONFIG = WorkerConfig(max_num_seqs=32, max_num_batched_tokens=256)


class Load:
    """Sends the requests, half over each front end."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, stub: services.InferenceStub) -> None:
        self._http = http
        self._stub = stub
        self._url = f"http://{stack.http}/v1/completions"
        self._chance = random.Random(11)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        """All of them, in an order drawn once."""
        kinds = ["invalid"] * NUM_INVALID + ["cancelled"] * NUM_CANCELLED
        kinds += ["whole"] * (NUM_REQUESTS - len(kinds))
        self._chance.shuffle(kinds)
        async with asyncio.TaskGroup() as group:
            for number, kind in enumerate(kinds):
                await self._slots.acquire()
                group.create_task(self._one(number, kind)).add_done_callback(
                    lambda _: self._slots.release()
                )

    async def _one(self, number: int, kind: str) -> None:
        prompt = [self._chance.randrange(3, 500) for _ in range(self._chance.choice([1, 9, 40]))]
        max_tokens = self._chance.choice([1, 4, 12, 30])
        if kind == "invalid":
            prompt = [10**6]
        late = kind == "cancelled" and number % 4 == 1
        ask = self._over_grpc if number % 2 else self._over_http
        begun = asyncio.Event()
        call = asyncio.create_task(ask(prompt, 60 if late else max_tokens, begun))
        if late:  # surely while the router has it
            await begun.wait()
            call.cancel()
        elif kind == "cancelled":
            await asyncio.sleep(self._chance.random() * 0.08)
            call.cancel()
        await asyncio.wait([call])
        self.seen["cancelled" if call.cancelled() else call.result()] += 1

    async def _over_http(self, prompt: list[int], max_tokens: int, _: asyncio.Event) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self._http.post(self._url, json=body)
        return {200: "whole", 400: "invalid"}[answer.status_code]

    async def _over_grpc(self, prompt: list[int], max_tokens: int, begun: asyncio.Event) -> str:
        request = wire.GenerateRequest(
            prompt_token_ids=wire.TokenIds(ids=prompt), max_tokens=max_tokens, ignore_eos=True
        )
        try:
            async for _ in self._stub.Generate(request):
                begun.set()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error  # noqa: PT017
            return "invalid"
        return "whole"


def router_counts(stack: Stack) -> Counter[str]:
    """Requests of the router: all, those that ended well, and failures by code."""
    value = stack.router.metrics.value
    counts: Counter[str] = Counter()
    for front_end, endpoint in (("http", "completions"), ("grpc", "generate")):
        counts["all"] += int(value(metrics.REQUESTS, door=front_end, endpoint=endpoint))
        for code in ErrorCode:
            counts[code] += int(value(metrics.REQUEST_FAILURES, door=front_end, code=code.value))
    counts["success"] = int(value(metrics.REQUEST_SUCCESS, finished_reason="length"))
    return counts


def resumes(stack: Stack) -> float:
    """Attempts that failed for a request that went on."""
    return sum(
        stack.router.metrics.value(metrics.RESUMES, cause=f"{role}_{outcome}")
        for role in Role
        for outcome in AttemptOutcome
    )


def worker_counts(worker: Worker) -> Counter[str]:
    """Attempts that ended on a worker, by outcome."""
    counters = worker.status().counters
    return Counter({key: counters[key] for key in (FINISHED, FAILED, CANCELLED, RELEASED)})


async def test_a_thousand_requests_add_up_and_leave_nothing(tmp_path: Path) -> None:
    write_model_text(tmp_path)
    save_tiny_llama(tmp_path, vocab_size=512)
    async with running_stack(str(tmp_path), prefill_config=CONFIG, decode_config=CONFIG) as stack:
        async with (
            httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=AT_ONCE)) as http,
            grpc.aio.insecure_channel(stack.grpc) as channel,
        ):
            load = Load(stack, http, services.InferenceStub(channel))
            await load.run()
        async with asyncio.timeout(60):
            await stack.pair.idle()
            while stack.router.num_requests:
                await asyncio.sleep(0.01)
        counts = router_counts(stack)
        assert counts["all"] == counts["success"] + sum(counts[code] for code in ErrorCode)
        assert counts["all"] == counts["success"] + counts[ErrorCode.CANCELLED] + NUM_INVALID
        assert counts[ErrorCode.INVALID_REQUEST] == load.seen["invalid"] == NUM_INVALID
        # A cancel may come before the router has seen the request, or after it has answered it.
        assert counts["all"] >= NUM_REQUESTS - NUM_CANCELLED
        assert counts["success"] >= load.seen["whole"] >= NUM_REQUESTS - NUM_INVALID - NUM_CANCELLED
        assert counts[ErrorCode.CANCELLED] > NUM_CANCELLED // 4

        (prefill,), (decode,) = stack.pair.prefills, stack.pair.decodes
        ended = [worker_counts(worker) for worker in (prefill, decode)]
        # A cancel may reach one worker before the other has the request, which then learns its end
        # from the first.
        assert abs(ended[0].total() - ended[1].total()) <= counts[ErrorCode.CANCELLED]
        assert ended[1][FAILED] <= counts[ErrorCode.CANCELLED]
        assert resumes(stack) == ended[0][FAILED] == 0  # no request that a client waits for fails
        assert 0 <= ended[0].total() - counts["success"] <= counts[ErrorCode.CANCELLED]
        assert ended[0][FINISHED] >= counts["success"]
        for worker in (prefill, decode):
            load_now = worker.status().load
            assert (load_now.running, load_now.waiting, load_now.waiting_tokens) == (0, 0, 0)
            assert (load_now.held_blocks, load_now.quarantined_blocks) == (0, 0)
        for gauge in (
            *(metrics.REQUESTS_RUNNING, metrics.REQUESTS_WAITING),
            *(metrics.QUEUED_REQUESTS, metrics.QUEUED_TOKENS),
        ):
            assert (gauge.name, stack.router.metrics.value(gauge)) == (gauge.name, 0)
        assert not any(stack.router._service._queue._tickets.values())
