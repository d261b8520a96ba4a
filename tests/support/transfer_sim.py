"""A sender and a receiver in a simulated world that the test controls.

Control messages stay in the network until the test delivers, loses, repeats or delays them; KV
stays on links until the test moves it, and the pools are dictionaries, so that every write and read
is checked against the block's holder at that moment. Time advances only when the test says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any

from kv_transfer.config import TransferConfig
from kv_transfer.control.context import Clock, EndpointContext
from kv_transfer.control.listeners import TransferReport
from kv_transfer.control.receiver import Receiver
from kv_transfer.control.sender import Sender
from kv_transfer.plan.states import GrantState
from protocol.errors import BatonError, ErrorInfo
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import Cells, KVLayout
from protocol.messages import Commit, Grant, Ticket
from tests.support.blocks import StrictBlocks
from tests.support.faults import Faults
from tests.support.transfer import SECRET, make_fingerprint
from tests.support.transfer_net import Cell, Fabric, Network, Op, SimLoop, SimRanks

CONFIG = TransferConfig(
    lease_s=60, op_timeout_s=10, connect_timeout_s=5, rpc_timeout_s=1, rpc_attempts=2, repair_s=5
)


Slot = tuple[int, int, int, int, int]  # rank, block, number of the cell in it, layer, head

# --- workers --------------------------------------------------------------------------------------


class Worker:
    """What both toy workers share: an allocator, and who may touch which block now."""

    def __init__(self, layout: KVLayout, cell: int) -> None:
        self.layout = layout
        self.cell = cell  # tokens
        self.per_block = layout.block_size // cell
        self.blocks = StrictBlocks(layout.num_blocks)
        self.held: dict[RequestKey, tuple[int, ...]] = {}
        self.outcomes: dict[RequestKey, list[str]] = {}
        self.memory: dict[Slot, Cell] = {}

    def slots(self, op: Op, cells: Cells, rank: int, first_head: int) -> list[Slot]:
        """The slots of one message, in the order of the wire; heads counted over the model."""
        assert cells.size == self.cell
        offset = self.layout.rank_heads[rank][0] + first_head
        places = list(zip(*cells.places(self.per_block), strict=True))
        first, num_layers = op.command.first_layer, op.command.num_layers
        layers = range(first, first + num_layers)
        return [
            (rank, block, number, layer, head)
            for layer in layers
            for block, number in places
            for head in range(offset, offset + op.part.num_heads)
        ]

    def own_slots(self, op: Op) -> list[Slot]:
        """Those on the rank that runs the command."""
        return self.slots(op, op.command.cells, op.command.rank, op.part.first_head)

    def contents(self, key: RequestKey, ids: tuple[int, ...]) -> Iterator[tuple[Slot, Cell]]:
        """Every slot of a sequence's blocks, with what belongs there."""
        for index in range(len(ids) * self.per_block):
            block, number = ids[index // self.per_block], index % self.per_block
            for rank, (first, last) in enumerate(self.layout.rank_heads):
                for layer in range(self.layout.num_layers):
                    for head in range(first, last):
                        yield (
                            (rank, block, number, layer, head),
                            (str(key), index, layer, head),
                        )

    def gather(self, op: Op) -> list[Cell]:
        raise AssertionError("only prefill sends")

    def scatter(self, op: Op, cells: list[Cell]) -> None:
        raise AssertionError("only decode receives")

    def write(self, op: Op, cells: list[Cell]) -> None:
        raise AssertionError("only into decode's blocks")

    def take(self, key: RequestKey, count: int) -> tuple[int, ...] | None:
        ids = self.blocks.allocate(count)
        if ids is None:
            return None
        self.held[key] = tuple(ids)
        return self.held[key]

    def give_back(self, key: RequestKey) -> None:
        self.blocks.free(self.held.pop(key))

    def note(self, key: RequestKey, outcome: str) -> None:
        seen = self.outcomes.setdefault(key, [])
        seen.append(outcome)
        assert len(seen) == 1, f"{key} ended more than once: {seen}"


class SimPrefill(Worker):
    """A toy prefill worker: computes prompts instantly, in steps that the test takes."""

    def __init__(self, layout: KVLayout, cell: int) -> None:
        super().__init__(layout, cell)
        self.grants: dict[RequestKey, Grant] = {}
        self.pushed: dict[RequestKey, int] = {}
        self.committing: set[RequestKey] = set()

    def gather(self, op: Op) -> list[Cell]:
        held = {block for ids in self.held.values() for block in ids}
        blocks = op.command.cells.blocks
        assert held.issuperset(blocks), "a block was read after it had been given back"
        return [self.memory[slot] for slot in self.own_slots(op)]

    def granted(self, key: RequestKey, grant: Grant) -> None:
        assert key not in self.grants
        self.grants[key] = grant

    def start(self, key: RequestKey) -> bool:
        """Take blocks and fill them with what this prompt's KV is."""
        grant = self.grants[key]
        ids = self.take(key, self.layout.blocks_for(grant.num_tokens))
        if ids is None:
            return False
        self.memory.update(self.contents(key, ids))
        cached = grant.num_cached_blocks * grant.layout.block_size
        self.pushed[key] = cached // self.layout.block_size
        return True

    def sent(self, key: RequestKey) -> None:
        raise AssertionError("no sequence runs here")

    def delivered(self, key: RequestKey, report: TransferReport) -> None:
        self.note(key, "committed")
        self.give_back(key)

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        self.note(key, "ended")
        self.grants.pop(key, None)
        if key in self.held:
            self.give_back(key)


class SimDecode(Worker):
    """A toy decode worker: knows at every moment who may write which block."""

    def __init__(self, layout: KVLayout, cell: int) -> None:
        super().__init__(layout, cell)
        self.tokens: dict[RequestKey, int] = {}
        self.writable: dict[int, RequestKey] = {}
        self.cached: dict[RequestKey, int] = {}
        self.reserved: dict[RequestKey, tuple[int, ...]] = {}  # given to the receiver, not back yet
        self.running: set[RequestKey] = set()
        self.firsts: dict[RequestKey, int] = {}
        self.dropped: set[RequestKey] = set()
        self.in_hand: Callable[[], set[RequestKey]] = set

    def scatter(self, op: Op, cells: list[Cell]) -> None:
        owners = {self.writable.get(block) for block in op.command.cells.blocks}
        assert len(owners) == 1, f"one write into blocks of {owners}"
        owner = owners.pop()
        assert owner is not None, "a write into blocks that are not granted"
        assert all(cell[0] == str(owner) for cell in cells), "a write of another request's KV"
        for slot, cell in zip(self.own_slots(op), cells, strict=False):
            self.memory[slot] = cell

    def write(self, op: Op, cells: list[Cell]) -> None:
        """Prefill writes by itself: only into what its request holds here, quarantine included."""
        assert op.command.peer_cells is not None
        part = op.part
        slots = self.slots(op, op.command.peer_cells, part.peer_rank, part.peer_first_head)
        for slot, cell in zip(slots, cells, strict=True):
            (key,) = [key for key, ids in self.reserved.items() if slot[1] in ids]
            assert cell[0] == str(key), "a write into blocks that were given to another request"
            assert self.reserved[key].index(slot[1]) >= self.cached[key], "a cached block"
            self.memory[slot] = cell

    def reserve(self, key: RequestKey, num_tokens: int, cached: int) -> tuple[int, ...] | None:
        ids = self.take(key, self.layout.blocks_for(num_tokens))
        if ids is None:
            return None
        for slot, cell in self.contents(key, ids):
            if cell[1] < cached * self.per_block:
                self.memory[slot] = cell
            else:
                self.memory.pop(slot, None)
        self.tokens[key] = num_tokens
        self.writable.update(dict.fromkeys(ids[cached:], key))
        self.reserved[key] = ids
        self.cached[key] = cached
        return ids

    def committed(self, key: RequestKey, commit: Commit) -> None:
        self.note(key, "committed")
        ids = self.reserved.pop(key)
        self.forbid(ids)
        for slot, cell in self.contents(key, ids):
            if cell[1] * self.cell < self.tokens[key]:
                assert self.memory.get(slot) == cell, "incomplete KV committed"
        (self.firsts[key],) = commit.tokens
        self.running.add(key)

    def finish(self, key: RequestKey) -> None:
        self.running.remove(key)
        self.give_back(key)

    def drop(self, key: RequestKey) -> None:
        """A committed sequence is not wanted: its blocks wait for `blocks_safe`."""
        self.running.remove(key)
        self.dropped.add(key)
        self.reserved[key] = self.held[key]
        self.blocks.quarantine(self.held[key])

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        self.note(key, "ended")
        ids = self.reserved.get(key)
        if ids is not None and key not in self.in_hand():
            self.forbid(ids, quarantine=True)

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        pass

    def blocks_safe(self, key: RequestKey, block_ids: tuple[int, ...]) -> None:
        assert self.reserved.pop(key) == block_ids
        ids = self.held.pop(key)
        if key not in self.outcomes:  # reserved for a hand-off that was over: `ended` came before
            raise AssertionError(f"blocks of {key} came back before its end")
        self.blocks.unquarantine(ids)

    def forbid(self, ids: tuple[int, ...], *, quarantine: bool = False) -> None:
        for block in ids:
            self.writable.pop(block, None)
        if quarantine:
            self.blocks.quarantine(ids)


class World:
    """One prefill and one decode worker, and everything between them."""

    def __init__(
        self,
        source: KVLayout,
        dest: KVLayout,
        config: TransferConfig = CONFIG,
        *,
        one_sided: bool = False,
    ) -> None:
        self.one_sided = one_sided
        self.loop = SimLoop()
        self.network = Network(self.loop)
        self.fabric = Fabric(self.loop)
        cell = gcd(source.block_size, dest.block_size)
        self.prefill = SimPrefill(source, cell)
        self.decode = SimDecode(dest, cell)
        clock = Clock(monotonic=self.loop.time, wall=self.loop.time)
        self.prefill_ref = _ref(Role.PREFILL, 11)
        self.decode_ref = _ref(Role.DECODE, 22)
        self.sender = Sender(
            EndpointContext(
                ref=self.prefill_ref,
                layout=source,
                fingerprint=make_fingerprint(source),
                secret=SECRET,
                ranks=SimRanks(self.fabric, self.prefill, self.decode if one_sided else None),
                clients=self.network,
                config=config,
                clock=clock,
            ),
            self.prefill,
        )
        self.receiver = Receiver(
            EndpointContext(
                ref=self.decode_ref,
                layout=dest,
                fingerprint=make_fingerprint(dest),
                secret=SECRET,
                ranks=SimRanks(self.fabric, self.decode, self.decode if one_sided else None),
                clients=self.network,
                config=config,
                clock=clock,
            ),
            self.decode,
        )
        self.network.handlers[self.prefill_ref.address] = self.sender.handlers()
        self.network.handlers[self.decode_ref.address] = self.receiver.handlers()
        self.faults = Faults()
        logging.getLogger("baton.kv_transfer").addHandler(self.faults)
        self.loop.run(self.receiver.start())
        self.sizes: dict[RequestKey, int] = {}
        self.handing_over: deque[tuple[RequestKey, tuple[int, ...], int]] = deque()
        self.decode.in_hand = lambda: {key for key, _, _ in self.handing_over}
        self.offered: set[RequestKey] = set()
        self.expected: set[RequestKey] = set()

    # --- what the workers may do ----------------------------------------------------------------

    def ticket(self, key: RequestKey, num_blocks: int, ttl_s: float = 120.0) -> Ticket:
        return Ticket(
            key=key,
            sender_epoch=self.prefill_ref.epoch,
            receiver_epoch=self.decode_ref.epoch,
            num_blocks=num_blocks,
            lifetime_s=ttl_s,
        ).signed(SECRET)

    def on_loop(self, work: Callable[[], Any]) -> BatonError | None:
        """Call something on the loop; a typed refusal is an answer."""

        async def call() -> Any:
            return work()

        task = self.loop.run(call())
        error = task.exception()
        if error is not None and not isinstance(error, BatonError):
            raise error
        return error

    def offer(self, key: RequestKey, ticket: Ticket) -> None:
        self.sizes[key] = ticket.num_blocks
        error = self.on_loop(lambda: self.receiver.offer(key, ticket, self.prefill_ref))
        if error is None:
            self.offered.add(key)

    def expect(self, key: RequestKey, ticket: Ticket) -> None:
        error = self.on_loop(lambda: self.sender.expect(key, ticket, self.decode_ref))
        if error is None:
            self.expected.add(key)

    def can_reserve(self) -> list[RequestKey]:
        return [
            key
            for key in sorted(self.offered, key=str)
            if key not in self.decode.held and key not in self.decode.outcomes
        ]

    def reserve(self, key: RequestKey, cached: int) -> None:
        """Decode's scheduler sets blocks aside; the receiver learns of it in `hand_over`."""
        num_tokens = self.num_tokens(key)
        cached = min(cached, num_tokens // self.decode.layout.block_size)
        ids = self.decode.reserve(key, num_tokens, cached)
        if ids is not None:
            self.handing_over.append((key, ids, cached))

    def num_tokens(self, key: RequestKey) -> int:
        """A prompt of some length that needs all the blocks of its ticket."""
        size = self.decode.layout.block_size
        return self.sizes[key] * size - (self.sizes[key] + key.attempt + len(str(key))) % size

    def hand_over(self) -> None:
        key, ids, cached = self.handing_over.popleft()
        if key in self.decode.outcomes:  # what a worker does on `ended` with blocks in hand
            self.decode.forbid(ids, quarantine=True)
        self.loop.run(self.receiver.reserve(key, (ids,), cached, self.num_tokens(key)))

    def leave(self, key: RequestKey, released: bool) -> None:
        """Decode stops wanting a request, committed or not."""
        if key in self.decode.running:
            self.decode.drop(key)
        self.loop.run(self.receiver.end(key, released))

    def can_push(self) -> list[RequestKey]:
        return [key for key in self.prefill.grants if key not in self.prefill.outcomes]

    def step(self, key: RequestKey, count: int) -> None:
        """Run a chunk of the prompt: push its blocks, commit after the last."""
        worker = self.prefill
        if key not in worker.held and not worker.start(key):
            return
        ids = worker.held[key]
        first = worker.pushed[key]
        part = ids[first : first + count]
        if part:
            self.on_loop(lambda: self.sender.push(key, part, first))
            worker.pushed[key] += len(part)
        if worker.pushed.get(key) == len(ids) and key not in worker.committing:
            worker.committing.add(key)
            self.on_loop(lambda: self.sender.commit(key, (7,)))

    def events(self) -> list[Callable[[], None]]:
        """Everything that can happen next without a fault."""
        network, fabric = self.network, self.fabric
        events: list[Callable[[], None]] = [self.hand_over] if self.handing_over else []
        events += [partial(self.reserve, key, 0) for key in self.can_reserve()]
        events += [partial(self.step, key, 2) for key in self.can_push()]
        events += [partial(network.deliver, letter) for letter in network.letters]
        events += [partial(fabric.send, wire) for wire in fabric.can_send()]
        events += [partial(fabric.receive, wire) for wire in fabric.can_receive()]
        return events

    def turn_clock(self, seconds: float) -> None:
        self.loop.now += seconds
        self.loop.settle()

    # --- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants of every moment."""
        self.faults.check()
        for worker in (self.prefill, self.decode):
            blocks = worker.blocks
            total = blocks.num_free + blocks.num_held + blocks.num_quarantined
            assert total == blocks.num_blocks
        quarantined = self.receiver.num_blocks(GrantState.QUARANTINED)
        granted = self.receiver.num_blocks(GrantState.GRANTED)
        in_hand = sum(len(ids) - cached for _, ids, cached in self.handing_over)
        assert granted == len(self.decode.writable) - in_hand
        assert quarantined <= self.decode.blocks.num_quarantined

    def wind_up(self) -> None:
        """Let every deadline pass with a dead network; then nothing may be left anywhere."""
        while self.handing_over:
            self.hand_over()
        for _ in range(200):
            for letter in list(self.network.letters):
                self.network.lose(letter)
            self.turn_clock(10.0)
            if not self.network.letters and self.loop.now > 5000:
                break
        for wire in list(self.fabric.wires.values()):
            self.fabric.snap(wire)
        self.loop.settle()
        # What an unresponsive sender may write is freed once its address refuses connections.
        for _ in range(50):
            for letter in list(self.network.letters):
                self.network.refuse(letter)
            self.turn_clock(10.0)
        self.check()
        for key in list(self.decode.running):
            self.decode.finish(key)
        assert self.sender.num_live == 0
        assert self.receiver.num_live == 0
        assert set(self.decode.outcomes) == self.offered
        assert set(self.prefill.outcomes) == self.expected
        assert self.decode.blocks.num_free == self.decode.blocks.num_blocks
        assert self.prefill.blocks.num_free == self.prefill.blocks.num_blocks
        for key, outcome in self.prefill.outcomes.items():
            if outcome == ["committed"]:
                assert self.decode.outcomes[key] == ["committed"], "prefill believes in a commit"

    def close(self) -> None:
        self.loop.run(self.sender.close())
        self.loop.run(self.receiver.close())
        for _ in range(5):
            for letter in list(self.network.letters):
                self.network.lose(letter)
            self.turn_clock(2.0)
        self.loop.close()
        logging.getLogger("baton.kv_transfer").removeHandler(self.faults)


def _ref(role: Role, epoch: int) -> WorkerRef:
    return WorkerRef(worker_id=str(role), epoch=epoch, role=role, address=f"{role}:1")
