"""Two toy workers in one process, with pools that can be compared bit for bit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kv_transfer.backends.base import Backend, LayerEvents
from kv_transfer.config import TransferConfig
from kv_transfer.control.context import EndpointContext, RankChannel
from kv_transfer.control.listeners import TransferReport
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from kv_transfer.data.data_plane import DataPlane
from kv_transfer.data.rank_commands import Finish, RankCommand, RankResult
from protocol import codec
from protocol.errors import DeadlineExceeded, ErrorInfo, Unavailable
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import FP8_KV, Cells, KVFingerprint, KVLayout
from protocol.messages import Commit, Grant, Ticket
from tests.support.one_sided import OneSidedBackend

SECRET = b"a secret of the tests"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES[FP8_KV] = torch.uint8  # codes


def submitted(plane: DataPlane, command: RankCommand) -> Future[RankResult]:
    """The result of a command, when there is one."""
    result: Future[RankResult] = Future()
    plane.submit(command, result.set_result)
    return result


class LocalRanks:
    """Ranks whose data planes live in this process."""

    def __init__(self, planes: Sequence[DataPlane]) -> None:
        self._planes = planes

    def submit(self, rank: int, command: RankCommand, finish: Finish) -> None:
        self._planes[rank].submit(command, finish)


def split_heads(num_heads: int, tp_size: int) -> tuple[tuple[int, int], ...]:
    """Even split, or replication when ranks outnumber heads; uneven when nothing else fits."""
    if tp_size >= num_heads and tp_size % num_heads == 0:
        copies = tp_size // num_heads
        return tuple((rank // copies, rank // copies + 1) for rank in range(tp_size))
    bounds = [rank * num_heads // tp_size for rank in range(tp_size + 1)]
    return tuple((first, max(last, first + 1)) for first, last in itertools.pairwise(bounds))


def make_layout(tp_size: int, **changes: Any) -> KVLayout:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 8,
        "block_size": 4,
        "num_blocks": 16,
        "dtype": "float32",
    }
    fields.update(changes)
    return KVLayout(**fields, rank_heads=split_heads(fields["num_kv_heads"], tp_size))


def make_fingerprint(layout: KVLayout, **changes: Any) -> KVFingerprint:
    fields: dict[str, Any] = {
        "model": "toy",
        "weights": "0",
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "dtype": layout.dtype,
        "rope": "plain",
    }
    fields.update(changes)
    return KVFingerprint(**fields)


class ToyPool:
    """One rank's pool (a `BlockStore`) with every write counted per block."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        first, last = layout.rank_heads[rank]
        self.num_layers = layout.num_layers
        self.num_heads = last - first
        self.block_size = layout.block_size
        self.head_dim = layout.head_dim
        self.dtype = DTYPES[layout.dtype]
        self.device = torch.device("cpu")
        self.step_events: LayerEvents | None = None
        shape = (layout.num_blocks, 2, self.num_heads, self.block_size, self.head_dim)
        self.layers = [torch.zeros(shape, dtype=self.dtype) for _ in range(layout.num_layers)]
        self.before_scatter: Callable[[], None] = lambda: None
        self.before_gather: Callable[[], None] = lambda: None

    def gather(
        self, cells: Cells, layers: range, heads: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.before_gather()
        picked = torch.stack(
            [
                torch.stack([self.layers[layer][at] for at in self._places(cells, heads)])
                for layer in layers
            ]
        )
        return picked if out is None else out.copy_(picked)

    def scatter(self, cells: Cells, layers: range, heads: range, data: torch.Tensor) -> None:
        self.before_scatter()
        for index, layer in enumerate(layers):
            for at, cell in zip(self._places(cells, heads), data[index], strict=True):
                self.layers[layer][at] = cell

    def _places(self, cells: Cells, heads: range) -> list[tuple[Any, ...]]:
        """Where each cell lies in a layer: one token after another, from the first block on."""
        places = []
        for number in range(cells.first, cells.first + cells.count):
            block, token = divmod(number * cells.size, self.block_size)
            tokens = slice(token, token + cells.size)
            heads_ = slice(heads.start, heads.stop)
            places.append((cells.blocks[block], slice(None), heads_, tokens))
        return places


def make_pools(layout: KVLayout) -> list[ToyPool]:
    return [ToyPool(layout, rank) for rank in range(layout.tp_size)]


def random_kv(layout: KVLayout, num_blocks: int, seed: int) -> torch.Tensor:
    """Random bits for so many blocks of the whole model: [layer, block, k/v, head, token, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (
        layout.num_layers,
        num_blocks,
        2,
        layout.num_kv_heads,
        layout.block_size,
        layout.head_dim,
    )
    return torch.randn(shape, generator=generator).to(DTYPES[layout.dtype])


def fill(pools: list[ToyPool], layout: KVLayout, blocks: Sequence[int], kv: torch.Tensor) -> None:
    for pool, (first, last) in zip(pools, layout.rank_heads, strict=True):
        for layer in range(layout.num_layers):
            pool.layers[layer][list(blocks)] = kv[layer, :, :, first:last]


def differing(
    pools: list[ToyPool], layout: KVLayout, blocks: Sequence[int], kv: torch.Tensor
) -> list[tuple[int, int]]:
    """(rank, layer) where the blocks do not hold exactly `kv`."""
    wrong = []
    for rank, (first, last) in enumerate(layout.rank_heads):
        for layer in range(layout.num_layers):
            if not torch.equal(
                pools[rank].layers[layer][list(blocks)], kv[layer, :, :, first:last]
            ):
                wrong.append((rank, layer))
    return wrong


def random_row(layout: KVLayout, num_tokens: int, seed: int) -> torch.Tensor:
    """Random bits for so many tokens of the whole model: [layer, k/v, head, token, dim]."""
    blocks = random_kv(layout, layout.blocks_for(num_tokens), seed)
    return blocks.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :num_tokens]


def fill_row(
    pools: list[ToyPool], layout: KVLayout, blocks: Sequence[int], row: torch.Tensor
) -> None:
    """Write a row of tokens through blocks, as an engine does."""
    for pool, (first, last) in zip(pools, layout.rank_heads, strict=True):
        for position in range(row.shape[3]):
            block, token = divmod(position, layout.block_size)
            for layer in range(layout.num_layers):
                target = pool.layers[layer][blocks[block], :, :, token]
                target.copy_(row[layer, :, first:last, position])


def differing_tokens(
    pools: list[ToyPool], layout: KVLayout, blocks: Sequence[int], row: torch.Tensor
) -> list[tuple[int, int]]:
    """(rank, position) where a row of tokens is not exactly `row`, read through blocks."""
    wrong = []
    for rank, (first, last) in enumerate(layout.rank_heads):
        stored = torch.stack(pools[rank].layers)[:, list(blocks)]
        found = stored.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : row.shape[3]]
        equal = (found == row[:, :, first:last]).flatten(0, 2).all(-1).all(0)
        wrong += [(rank, int(position)) for position in (~equal).nonzero()[:, 0]]
    return wrong


@dataclass
class Events:
    """Calls that a listener received; the futures of `wait` resolve on the next matching call."""

    grants: dict[RequestKey, Grant] = field(default_factory=dict)
    announced: list[tuple[RequestKey, float]] = field(default_factory=list)
    commits: list[tuple[RequestKey, Commit | TransferReport]] = field(default_factory=list)
    ends: list[tuple[RequestKey, ErrorInfo | None]] = field(default_factory=list)
    safe: list[tuple[RequestKey, tuple[int, ...]]] = field(default_factory=list)
    sends: list[RequestKey] = field(default_factory=list)  # live ones that are sent
    uncertain: list[RequestKey] = field(default_factory=list)  # ended without a known owner
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def granted(self, key: RequestKey, grant: Grant) -> None:
        assert key not in self.grants
        self.grants[key] = grant
        self.changed.set()

    def committed(self, key: RequestKey, result: Commit | TransferReport) -> None:
        self.commits.append((key, result))
        self.changed.set()

    delivered = committed

    def sent(self, key: RequestKey) -> None:
        self.sends.append(key)
        self.changed.set()

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        self.ends.append((key, error))
        self.uncertain += [key] * uncertain
        self.changed.set()

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        self.announced.append((key, in_s))
        self.changed.set()

    def blocks_safe(self, key: RequestKey, block_ids: tuple[int, ...]) -> None:
        self.safe.append((key, block_ids))
        self.changed.set()

    async def wait(self, ready: Callable[[Events], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.changed.clear()
                await self.changed.wait()

    def ended_with(self, key: RequestKey) -> ErrorInfo | None:
        return dict(self.ends)[key]

    def is_over(self, key: RequestKey) -> bool:
        return key in dict(self.ends) or key in dict(self.commits)


async def reply_of(handler: Callable[[Any], Any], request: Any) -> Any:
    """What a handler answers, at once or later."""
    reply = handler(request)
    return await reply if isinstance(reply, Awaitable) else reply


class DirectClients:
    """Calls handlers of this process through the codec. `intercept` may delay or lose calls."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[Any, Callable[[Any], Any]]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.intercept: Callable[[str, Any, Any], Awaitable[None]] | None = None

    def get(self, address: str) -> _Direct:
        return _Direct(self, address)


class _Direct:
    def __init__(self, clients: DirectClients, address: str) -> None:
        self._clients = clients
        self._address = address

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        self._clients.calls.append((method.name, request))
        if self._clients.intercept is not None:
            await self._clients.intercept(self._address, method, request)
        handler = self._clients.handlers.get(self._address, {}).get(method)
        if handler is None:
            raise Unavailable(f"connection to {self._address} refused", param="address")
        copy = codec.decode(method.request, codec.encode(request))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply_of(handler, copy)
        except TimeoutError:
            raise DeadlineExceeded(f"{method.name}: no answer in time") from None


@dataclass
class ToyWorker:
    """A worker without an engine."""

    ref: WorkerRef
    layout: KVLayout
    pools: list[ToyPool]
    planes: list[DataPlane]
    events: Events


#: Nothing is given up because the machine is busy.
PATIENT = TransferConfig(
    lease_s=60, op_timeout_s=20, connect_timeout_s=20, rpc_timeout_s=10, repair_s=0.5
)


def make_toy_worker(
    role: Role,
    layout: KVLayout,
    config: TransferConfig,
    backends: Callable[[], Backend],
    epoch: int,
) -> ToyWorker:
    pools = make_pools(layout)
    return ToyWorker(
        ref=WorkerRef(
            worker_id=f"{role}-{epoch}", epoch=epoch, role=role, address=f"{role}-{epoch}:1"
        ),
        layout=layout,
        pools=pools,
        planes=[_make_plane(pool, config, backends()) for pool in pools],
        events=Events(),
    )


def _make_plane(pool: ToyPool, config: TransferConfig, backend: Backend) -> DataPlane:
    if isinstance(backend, OneSidedBackend):
        backend.bind_store(pool)
    return DataPlane(pool, config, backend=backend)


class Pair:
    """A sender and a receiver joined by direct calls and real data planes."""

    def __init__(
        self,
        *,
        source: KVLayout,
        dest: KVLayout,
        backends: Callable[[], Backend],
        config: TransferConfig = PATIENT,
        clients: DirectClients | None = None,
        wrap: Callable[[RankChannel], RankChannel] = lambda ranks: ranks,
        dest_fingerprint: KVFingerprint | None = None,
        epochs: tuple[int, int] = (11, 22),
    ) -> None:
        self.clients = clients or DirectClients()
        self.config = config
        self.prefill = make_toy_worker(Role.PREFILL, source, config, backends, epochs[0])
        self.decode = make_toy_worker(Role.DECODE, dest, config, backends, epochs[1])
        self.sender = Sender(
            EndpointContext(
                ref=self.prefill.ref,
                layout=source,
                fingerprint=make_fingerprint(source),
                secret=SECRET,
                ranks=wrap(LocalRanks(self.prefill.planes)),
                clients=self.clients,
                config=config,
            ),
            self.prefill.events,
        )
        self.receiver = Receiver(
            EndpointContext(
                ref=self.decode.ref,
                layout=dest,
                fingerprint=dest_fingerprint or make_fingerprint(dest),
                secret=SECRET,
                ranks=wrap(LocalRanks(self.decode.planes)),
                clients=self.clients,
                config=config,
            ),
            self.decode.events,
        )
        self.clients.handlers[self.prefill.ref.address] = self.sender.handlers()
        self.clients.handlers[self.decode.ref.address] = self.receiver.handlers()

    async def __aenter__(self) -> Self:
        await self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sender.close()
        await self.receiver.close()
        for plane in (*self.prefill.planes, *self.decode.planes):
            plane.close()

    def ticket(self, key: RequestKey, num_blocks: int, ttl_s: float = 30.0) -> Ticket:
        return Ticket(
            key=key,
            sender_epoch=self.prefill.ref.epoch,
            receiver_epoch=self.decode.ref.epoch,
            num_blocks=num_blocks,
            lifetime_s=ttl_s,
        ).signed(SECRET)

    def submit(self, key: RequestKey, num_blocks: int, ttl_s: float = 30.0) -> Ticket:
        """What the router does: both sides learn of the request."""
        ticket = self.ticket(key, num_blocks, ttl_s)
        self.receiver.offer(key, ticket, self.prefill.ref)
        self.sender.expect(key, ticket, self.decode.ref)
        return ticket

    async def run(
        self,
        key: RequestKey,
        source_blocks: tuple[int, ...],
        dest_blocks: tuple[int, ...],
        *,
        num_cached: int = 0,
        chunk: int = 2,
        first_token: int = 7,
        num_tokens: int | None = None,
    ) -> None:
        """A whole hand-off, pushed in chunks; returns when both sides have committed."""
        self.submit(key, len(dest_blocks))
        await self.receiver.reserve(key, (dest_blocks,), num_cached, num_tokens)
        there = num_cached * self.decode.layout.block_size // self.prefill.layout.block_size
        for first in range(there, len(source_blocks), chunk):
            blocks = source_blocks[first : first + chunk]
            self.sender.push(key, blocks, first)
        self.sender.commit(key, (first_token,))
        await self.prefill.events.wait(lambda e: e.is_over(key))
        await self.decode.events.wait(lambda e: e.is_over(key))
