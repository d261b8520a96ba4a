"""How long a loan takes between two workers of one host whose steps are made up, so that no kernel
of a model has to be compiled: real workers, pools of random bits, which are compared.

    python -m tests.gpu.loans_bench --tokens 8192 4096 2048

A token has 128 KiB (32 layers, 8 KV heads of 128, bfloat16). With `--device cpu --backend tcp` it
has a sixteenth of that. With `--device cpu --backend cuda_ipc` no byte moves, but each write takes
as long as over NVLink: the rest is what the software takes, on this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

import kv_transfer.data.data_plane
import worker_runtime.worker
from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from kv_tiers.config import TierConfig
from kv_transfer.backends.base import BlockMove, End, LinkId, LinkMode
from kv_transfer.backends.host import host_id
from kv_transfer.config import BackendName, ChecksumKind
from protocol.ids import RequestKey, Role
from protocol.kv_layout import KVFingerprint, KVLayout
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.timeline import Phase
from tests.gpu.chaos_worker import Host, Process, child
from tests.gpu.test_moves import Pair, settings_for
from worker_runtime.scheduling.prefix_cache import hash_blocks

LAYERS, HEADS, BLOCK, VOCAB = 32, 8, 16, 1000
TOKEN_S, STEP_S = 2e-5, 1e-3
LINK, TOKEN_BYTES = 395e9, 131072  # bytes per second, bytes
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def made_up(head_dim: int) -> KVFingerprint:
    """Of no model."""
    return KVFingerprint(
        model="made up",
        weights="",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        dtype="bfloat16",
        rope="",
    )


class MadeUpStep:
    """Ends at a time."""

    number = 0

    def __init__(self, result: StepResult, end: float) -> None:
        self._result, self._end = result, end

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self._end - time.monotonic()))
        return self._result


class MadeUpEngine:
    """Steps that take their time and touch no KV (engine.executor.Executor)."""

    num_ranks, token_s, step_rows = 1, 0.0, ()
    precision, vocab_size, max_model_len = "bfloat16", VOCAB, 1 << 20

    def __init__(self, engine: EngineConfig, token_s: float) -> None:
        on_gpu, num_blocks = engine.device != "cpu", engine.num_blocks
        assert num_blocks is not None
        self.depth = 2 if on_gpu else 1
        self.fingerprint = made_up(128 if on_gpu else 8)
        self.layout = KVLayout(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=self.fingerprint.head_dim,
            block_size=BLOCK,
            num_blocks=num_blocks,
            dtype="bfloat16",
            rank_heads=((0, HEADS),),
        )
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.pool = KVPool(self.layout, 0, torch.bfloat16, device)
        self.pool.data.view(torch.int16).random_(-30000, 30000)
        self._end = 0.0
        self._token_s = token_s

    def launch(self, batch: StepBatch) -> MadeUpStep:
        took = max(STEP_S, self._token_s * batch.num_tokens)
        self._end = max(self._end, time.monotonic()) + took
        sampled = tuple(1 if sequence.sampling else None for sequence in batch.sequences)
        return MadeUpStep(StepResult(tokens=sampled), self._end)

    def __getattr__(self, name: str) -> Any:
        if name in ("use_threads", "enter_thread", "while_launching", "close"):
            return lambda *_: None
        if name == "progress":
            return str
        raise AttributeError(name)


class MadeUpLink:
    """Writes that take their time and no byte (kv_transfer.backends.cuda_ipc), and its backend."""

    name, mode, _end = "cuda_ipc", LinkMode.UNORDERED, 0.0

    def listen(self) -> str:
        return f"{host_id()}|"

    def connect(self, link: LinkId, endpoint: str, timeout_s: float) -> MadeUpLink:
        return self

    def accept(self, link: LinkId, timeout_s: float) -> MadeUpLink:
        return self

    def send_blocks(self, move: BlockMove, timeout_s: float) -> End:
        assert move.access.enter()
        num_bytes = move.cells.num_tokens * TOKEN_BYTES * move.num_layers / LAYERS
        end = self._end = max(self._end, time.monotonic()) + num_bytes / LINK

        def over() -> int:
            time.sleep(max(0.0, end - time.monotonic()))
            move.access.leave()
            return 0

        return over

    def recv_blocks(self, move: BlockMove, timeout_s: float) -> End:
        return lambda: 0

    def close(self) -> None:
        """Nothing is open."""


class LoanHost(Host):
    """A worker with such an engine."""

    async def sums(self, names: Sequence[bytes]) -> list[list[int]]:
        """Of the bits of cached blocks, for each layer and block."""
        scheduler: Any = self._worker._loop._scheduler
        ids = scheduler._blocks.find(names)
        bits = self._worker.ranks.executor.pool.data.view(torch.int16)[:, ids].flatten(2)
        places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
        return [(layer.long() * places).sum(-1).tolist() for layer in bits]


def loan_child(*args: Any) -> None:
    """The life of a worker process."""
    settings = args[1]
    if settings.engine.device == "cpu" and settings.transfer.backend is BackendName.AUTO:
        sys.setswitchinterval(50e-6)  # as on a GPU
        kv_transfer.data.data_plane.build_backends = lambda _store, _config: [MadeUpLink()]
    slow = settings.transfer.backend is BackendName.TCP  # slower than computing would be
    token_s = TOKEN_S * (10 if slow else 1)
    worker_runtime.worker.load_ranks = lambda engine, *_: MadeUpEngine(engine, token_s)  # type: ignore[assignment,return-value]
    child(*args, host=LoanHost)


async def measure(pair: Pair, num_tokens: int, rounds: int, head_dim: int, *, moves: bool) -> None:
    """Loans of one size; prints times in ms. `moves`: bytes, which are compared."""
    holder, borrower = pair.processes
    source = random.Random(num_tokens)

    async def ask(process: Process, prompt: list[int], lender: Process | None = None) -> Any:
        there = None if lender is None else (lender.ref, num_tokens)
        began = time.monotonic()
        key = await pair.router.submit(prompt, TWO, process.ref, None, source=there)
        answer = await pair.router.answer(key)
        return answer, answer.arrivals[0] - began

    loads, firsts, cached, refused = [], [], [], 0
    for number in range(-3, rounds):
        prompt = [source.randrange(VOCAB) for _ in range(num_tokens + 5)]
        await ask(holder, prompt)
        await asyncio.sleep(0.02)
        answer, first_s = await ask(borrower, prompt, holder)
        if answer.cached < num_tokens:
            refused += 1
            continue
        if number in (-1, rounds - 1):
            submit = partial(Submit, router_id="", sampling=TWO, time_left_s=1.0)
            asked = submit(key=RequestKey("names", 0), prompt_ids=tuple(prompt[:num_tokens]))
            names = hash_blocks(asked, made_up(head_dim), BLOCK)
            there, here = await holder.do("sums", names), await borrower.do("sums", names)
            assert there == here or not moves
            assert len(there[0]) == len(here[0]) == len(names)
        if number >= 0:
            (span,) = [span for span in answer.spans if span.phase is Phase.KV_LOAD]
            loads.append(span.end - span.start)
            firsts.append(first_s)
            cached.append((await ask(borrower, prompt))[1])
    num_bytes = (4 * LAYERS * HEADS * head_dim if moves else TOKEN_BYTES) * num_tokens
    print(
        f"{num_tokens} tokens, {num_bytes / 1e9:.2f} GB, {len(loads)} loans, {refused} refused: "
        f"{1e3 * median(loads):.2f} ms, least {1e3 * min(loads):.2f}, "
        f"{num_bytes / median(loads) / 1e9:.0f} GB/s; first token {1e3 * median(firsts):.2f}, "
        f"with the prefix here already {1e3 * median(cached):.2f}",
        flush=True,
    )


async def main() -> None:
    """Two workers, on cards of their own if there are two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="cuda_ipc")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 4096, 2048])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    moves = options.device != "cpu" or options.backend == "tcp"
    processes = []
    for number, gpu in enumerate(options.gpus):
        backend = options.backend if moves else "auto"
        settings = settings_for(number, "/nowhere", options.device, backend)
        blocks = 6 * (max(options.tokens) // BLOCK + 8)
        settings = replace(
            settings,
            engine=replace(settings.engine, num_blocks=blocks),
            worker=replace(settings.worker, enable_prefix_caching=True),
            tiers=TierConfig(host_bytes=0),
        )
        if not moves:
            without = replace(settings.transfer, checksum=ChecksumKind.NONE)
            settings = replace(settings, transfer=without)
        processes.append(Process(Role.DECODE, settings, [gpu], main=loan_child))
    pair = Pair(processes)
    try:
        await pair.start()
        for num_tokens in options.tokens:
            head_dim = 128 if options.device != "cpu" else 8
            await measure(pair, num_tokens, options.rounds, head_dim, moves=moves)
        await asyncio.gather(*(process.do("stop") for process in processes))
    finally:
        await pair.router.close()
        for process in processes:
            process.kill()


if __name__ == "__main__":
    asyncio.run(main())
