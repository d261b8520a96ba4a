"""The ranks of one worker of the hand-off benchmark: all in the worker's process, or all but the
first in processes of their own, as in production."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from cluster.gc_tuning import freeze_heap
from engine.kv.pool import KVPool
from kv_transfer.config import TransferConfig
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.rank_commands import Finish, RankCommand, pass_on
from protocol.kv_layout import KVLayout


class Rank:
    """One rank's pool and data plane."""

    def __init__(self, layout: KVLayout, rank: int, config: TransferConfig) -> None:
        self._layout = layout
        self._device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self._device)
        self._heads = slice(*layout.rank_heads[rank])
        self.pool = KVPool(layout, rank, getattr(torch, layout.dtype), self._device)
        self.plane = DataPlane(self.pool, config)
        self._kept: list[torch.Tensor] = []

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Random bits, the same on both workers for the same seed."""
        ids = torch.tensor(blocks, device=self._device)
        for layer, bits in enumerate(random_layers(self._layout, len(blocks), seed, self._device)):
            self.pool.data[layer, ids] = self._own(bits[:, :, self._heads])
        torch.cuda.synchronize(self._device)

    def fill_late(self, blocks: Sequence[int], seed: int) -> int:
        """The same by a slow step, whose number is returned before it has run."""
        ids = torch.tensor(blocks, device=self._device)
        layers = random_layers(self._layout, len(blocks), seed, self._device)
        self._kept = [ids, *layers]  # the step has yet to read them
        events = self.pool.step_events
        assert events is not None
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                events.begin()
                for layer, bits in enumerate(layers):
                    torch.cuda._sleep(5_000_000)  # noqa: SLF001
                    self.pool.data[layer, ids] = self._own(bits[:, :, self._heads])
                    events.mark(layer)
                return events.end()

    def wrong_layers(self, blocks: Sequence[int], seed: int, coded: bool = False) -> int:
        """Layers whose content differs from what `fill` wrote on the other worker; `coded`: its
        pool has, or sent, codes."""
        ids = torch.tensor(blocks, device=self._device)
        wrong = 0
        for layer, bits in enumerate(random_layers(self._layout, len(blocks), seed, self._device)):
            got, want = self.pool.data[layer, ids], bits[:, :, self._heads]
            if coded:  # what is no number may have another sign
                got, want = (
                    _numbers(got).nan_to_num(999.0),
                    _numbers(_codes(want)).nan_to_num(999.0),
                )
            wrong += not torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))
        return wrong

    def _own(self, bits: torch.Tensor) -> torch.Tensor:
        return bits if self.pool.dtype is torch.bfloat16 else _codes(bits)

    def close(self) -> None:
        self.plane.close()


class FarRank:
    """The same in a process of its own. Answers may come in any order."""

    def __init__(self, layout: KVLayout, rank: int, config: TransferConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._child = context.Process(target=_serve, args=(other, layout, rank, config))
        self._child.start()
        other.close()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        self.call("ready").result(120)

    def call(self, name: str, *args: Any) -> Future[Any]:
        """Start a method of Rank there, or a rank command."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = future
            self._pipe.send((number, name, args))
        return future

    def close(self) -> None:
        self.call("close").result(30)
        self._child.join(10)
        self._child.kill()

    def _listen(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                return
            self._calls.pop(number).set_result(answer)


class Ranks:
    """All ranks of one endpoint (a `RankChannel`); with `apart` all but the first are processes."""

    def __init__(self, layout: KVLayout, config: TransferConfig, *, apart: bool) -> None:
        kind = FarRank if apart else Rank
        self.first = Rank(layout, 0, config)
        rest = [kind(layout, rank, config) for rank in range(1, layout.tp_size)]
        torch.cuda.set_device(0)
        self._ranks: list[Rank | FarRank] = [self.first, *rest]

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        """Give a command to a rank."""
        found = self._ranks[rank]
        if isinstance(found, Rank):
            found.plane.submit(command, finish)
        else:
            call = found.call("command", command.encode())
            call.add_done_callback(partial(pass_on, rank, finish))

    def everywhere(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every rank; what they return."""
        far = [rank.call(name, *args) for rank in self._ranks if isinstance(rank, FarRank)]
        near = [getattr(rank, name)(*args) for rank in self._ranks if isinstance(rank, Rank)]
        return near + [call.result(120) for call in far]

    def near(self) -> list[Rank]:
        """Those in this process."""
        return [rank for rank in self._ranks if isinstance(rank, Rank)]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.float8_e4m3fn) if values.dtype is torch.uint8 else values).float()


def random_layers(
    layout: KVLayout, num_blocks: int, seed: int, device: torch.device
) -> list[torch.Tensor]:
    """Random bits for consecutive tokens, independent of the blocks that hold them."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (num_blocks, layout.block_size, 2, layout.num_kv_heads, layout.head_dim)
    rows = (
        torch.randint(
            -32768, 32767, shape, dtype=torch.int16, device=device, generator=generator
        ).view(torch.bfloat16)
        for _ in range(layout.num_layers)
    )
    return [row.permute(0, 2, 3, 1, 4).contiguous() for row in rows]


def _serve(pipe: Connection, layout: KVLayout, number: int, config: TransferConfig) -> None:
    rank = Rank(layout, number, config)
    freeze_heap()
    sending = threading.Lock()

    def answer(call: int, result: Any) -> None:
        with sending:
            pipe.send((call, result))

    def ended(call: int, future: Future[bytes]) -> None:
        answer(call, future.result())

    while True:
        try:
            call, name, args = pipe.recv()
        except EOFError:
            return
        if name == "command":
            rank.plane.execute(*args).add_done_callback(partial(ended, call))
        else:
            answer(call, None if name == "ready" else getattr(rank, name)(*args))
        if name == "close":
            return
