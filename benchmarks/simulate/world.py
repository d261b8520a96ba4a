"""One router and its workers on a virtual clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.devices import StepTime
from benchmarks.simulate.worker import FINGERPRINT, Delays, Worker
from cluster.bench.workload import Ask
from decode_worker.scheduler import DecodeScheduler
from engine.kv.allocator import BlockAllocator
from kv_transfer.control.listeners import TransferReport
from prefill_worker.scheduler import PrefillScheduler
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.kv_layout import KVLayout
from protocol.messages import PrefixSource, Submit, TokenEvent
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.workers.bookkeeping import PromptBlocks
from router.workers.policy import (
    LocalReason,
    Need,
    WorkerView,
    choose,
    choose_decode,
    has_room,
)
from router.workers.prompt_queues import ASKED_S, LOOK_S, MAX_GIVEN_BACK, find_move
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling.both_roles import BothRoles
from worker_runtime.scheduling.kv_tiers import KVTiers
from worker_runtime.scheduling.messages import (
    AnnounceCommit,
    BlocksSafe,
    CommitAnnounced,
    CommitHandoff,
    Committed,
    Delivered,
    EndHandoff,
    Granted,
    HandoffEnded,
    MoveOut,
    Push,
    RequestCancelled,
    RouterEvents,
    Sent,
    StepOutput,
)
from worker_runtime.scheduling.peer_blocks import PeerBlocks

#: KV of a token of the 8B model over a link of 100 GB/s, for sequences that move; before a move
#: that found no room is tried again.
_MOVED_TOKEN_S = 1.3e-6
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. Blocks hold `block_size` tokens; each worker has `num_blocks`."""

    step_time: StepTime
    num_prefill: int = 1
    num_decode: int = 1
    prefill: WorkerConfig
    decode: WorkerConfig
    router: RouterConfig
    num_blocks: int = 30_000
    block_size: int = 32
    step_rows: tuple[int, ...] = ()
    delays: Delays = field(default_factory=Delays)
    seed: int = 0


@dataclass(slots=True)
class Request:
    """One request and the times at which its tokens reached the client."""

    ask: Ask
    sent: float
    times: list[float] = field(default_factory=list)
    local: bool = False
    moving: bool = False
    num_moves: int = 0  # before anything was computed


class World:
    """Runs a list of requests and keeps the times of their tokens. `gaps_s`: the longest gap
    that each is promised; `firsts_s`: the time to its first token. `on_second` is called once a
    second until the last request has arrived, with the prompt tokens that came in it."""

    def __init__(
        self,
        setup: Setup,
        asks: Sequence[Ask],
        gaps_s: Sequence[float | None] = (),
        *,
        firsts_s: Sequence[float | None] = (),
        on_second: Callable[[World, int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._setup = setup
        self._message_s = setup.delays.message_s
        self._on_second = on_second
        self._arrived = 0
        self._layout = KVLayout(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
            dtype="float32",
            rank_heads=((0, 1),),
        )
        self._rng = random.Random(setup.seed)
        self._requests: dict[str, Request] = {}
        self._submits: dict[str, Submit] = {}  # of the newest attempt
        self._pairs: dict[RequestKey, tuple[Worker, Worker | None]] = {}
        self._movable: set[RequestKey] = set()
        self._asked: dict[RequestKey, tuple[Worker, int]] = {}  # where to, prompt tokens
        self._next_look = 0.0
        pools = {Role.DECODE: setup.num_decode, Role.PREFILL: setup.num_prefill}
        self.workers = tuple(
            self._worker(role, number) for role, size in pools.items() for number in range(size)
        )
        for worker in self.workers:
            worker.on_report = self._look_at_queues
        promised = itertools.zip_longest(asks, gaps_s, firsts_s)
        for number, (ask, *promises) in enumerate(promised):
            self.clock.at(ask.at, self._arrive, RequestKey(f"r{number}", 0), ask, *promises)
        if on_second is not None:
            for second in range(1, int(max(ask.at for ask in asks)) + 1):
                self.clock.at(second, self._look)

    def run(self) -> list[Request]:
        """All requests, in the order of their arrival, when the last token has come."""
        self.clock.run()
        return list(self._requests.values())

    def of(self, role: Role) -> list[Worker]:
        """The workers that have a role now."""
        return [worker for worker in self.workers if worker.role is role]

    def change_role(self, worker_id: str, role: Role) -> None:
        """Give a worker another role; what it decodes moves to others."""
        (worker,) = (each for each in self.workers if each.ref.worker_id == worker_id)
        worker.change(role)
        for submit in list(self._submits.values()):
            self._unload(submit)

    def _look(self) -> None:
        assert self._on_second is not None
        arrived, self._arrived = self._arrived, 0
        self._on_second(self, arrived)

    def _worker(self, role: Role, number: int) -> Worker:
        setup = self._setup
        ref = WorkerRef(worker_id=f"{role}-{number}", epoch=number + 1, role=role, address="-:1")
        blocks = BlockAllocator(setup.num_blocks, setup.block_size)
        tiers, peers = self._below(blocks)
        made = {
            each: scheduler(
                config=config,
                blocks=blocks,
                fingerprint=FINGERPRINT,
                place=ref.worker_id,
                tiers=tiers,
                peers=peers,
                step_rows=setup.step_rows,
            )
            for each, scheduler, config in (
                (Role.PREFILL, PrefillScheduler, setup.prefill),
                (Role.DECODE, DecodeScheduler, setup.decode),
            )
        }
        both = BothRoles(made, blocks, role, tiers, peers)
        return Worker(self.clock, both, ref, setup.step_time, self._take, self._message_s)

    def _below(self, _blocks: BlockAllocator) -> tuple[KVTiers | None, PeerBlocks | None]:
        """Where a worker's KV comes from beside its pool."""
        return None, None

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        """The tokens of the next request: here those of no other."""
        return (len(self._requests) + 1,) * ask.prompt_tokens

    def _source(
        self, _submit: Submit, _computes: WorkerView, _views: Sequence[WorkerView]
    ) -> PrefixSource | None:
        """Another worker that has more of a prompt than the one that computes it."""
        return None

    def _arrive(
        self, key: RequestKey, ask: Ask, gap_s: float | None, first_s: float | None
    ) -> None:
        self._arrived += ask.prompt_tokens
        prompt, delays = self._prompt(ask), self._setup.delays
        self._requests[key.request_id] = Request(ask, self.clock.now)
        placed_s = delays.place_s + delays.place_token_s * ask.prompt_tokens
        self.clock.after(placed_s, self._place, key, prompt, gap_s, first_s)

    def _place(
        self,
        key: RequestKey,
        prompt: tuple[int, ...],
        gap_s: float | None,
        first_s: float | None,
        computes: WorkerRef | None = None,
    ) -> None:
        setup, request = self._setup, self._requests[key.request_id]
        ask = request.ask
        blocks = PromptBlocks(prompt)
        views = {worker.ref: worker.view(self._layout, blocks) for worker in self.workers}
        choice = choose(
            Need(
                prompt_tokens=ask.prompt_tokens, total_tokens=ask.prompt_tokens + ask.output_tokens
            ),
            [views[worker.ref] for worker in self.of(Role.DECODE)],
            [views[worker.ref] for worker in self.of(Role.PREFILL)],
            config=setup.router,
            rng=self._rng,
            computes=computes,
        )
        assert choice is not None
        workers = {worker.ref: worker for worker in self.workers}
        decode = workers[choice.decode.ref]
        prefill = None if choice.prefill is None else workers[choice.prefill.ref]
        request.local = prefill is None
        self._pairs[key] = decode, prefill
        submit = Submit(
            key=key,
            router_id="router",
            prompt_ids=prompt,
            sampling=SamplingParams(seed=1, max_tokens=ask.output_tokens, ignore_eos=True),
            time_left_s=1e6,
            peer=None if prefill is None else prefill.ref,
            gap_s=gap_s,
            first_s=first_s,
            waited_s=self.clock.now - request.sent if key.attempt else 0.0,
        )
        self._submits[key.request_id] = submit
        num_blocks = -(-(ask.prompt_tokens + 1) // setup.block_size)
        takes = choice.prefill or choice.decode
        source = self._source(submit, takes, list(views.values()))
        spared = max(takes.cached_tokens, 0 if source is None else source.num_tokens)
        if not spared and choice.local_reason in (None, LocalReason.PREFILL_BUSY):
            self._movable.add(key)
        tokens, aided = ask.prompt_tokens - spared, replace(submit, source=source)
        if prefill is None:
            self._submit(decode, aided, Role.DECODE, tokens=tokens, blocks=num_blocks)
        else:
            self._submit(decode, submit, Role.DECODE, tokens=0, blocks=num_blocks)
            self._submit(prefill, aided, Role.PREFILL, tokens=tokens, blocks=0)

    def _submit(
        self, worker: Worker, submit: Submit, role: Role, *, tokens: int, blocks: int
    ) -> None:
        worker.reservations.reserve(submit.key, tokens=tokens, blocks=blocks)
        self.clock.after(self._message_s, worker.submit, submit, role)

    def _unload(self, submit: Submit) -> None:
        """Move a running sequence if its worker does not decode any more."""
        key, request = submit.key, self._requests[submit.key.request_id]
        source, _ = self._pairs[key]
        if self._submits.get(key.request_id) is not submit or not request.times:
            return
        if source.role is Role.DECODE or request.moving:
            return
        views = {worker.ref: worker.view(self._layout) for worker in self.of(Role.DECODE)}
        total = request.ask.prompt_tokens + request.ask.output_tokens
        num_tokens = request.ask.prompt_tokens + len(request.times)
        need = Need(prompt_tokens=num_tokens, total_tokens=total)
        chosen = choose_decode(need, list(views.values()), self._rng, self._setup.router)
        if chosen is None or not has_room(need, chosen):
            self.clock.after(_RETRY_S, self._unload, submit)
            return
        (target,) = (worker for worker in self.workers if worker.ref == chosen.ref)
        request.moving = True
        moved = replace(
            submit,
            key=RequestKey(key.request_id, key.attempt + 1),
            output_ids=(7,) * len(request.times),
            peer=source.ref,
            live=True,
        )
        self._pairs[moved.key] = target, source
        self._submits[key.request_id] = moved
        blocks = -(-num_tokens // self._setup.block_size)
        self._submit(target, moved, Role.DECODE, tokens=0, blocks=blocks)
        leave = MoveOut(key=key, to=moved.key, num_output=len(request.times))
        self.clock.after(2 * self._message_s, source.tell, leave)

    def _take(self, worker: Worker, out: StepOutput) -> None:
        """What one iteration of a worker's step loop hands out."""
        for events in out.events.values():
            self._deliver(worker, events)
        for reserve in out.reserves:
            _, sender = self._pairs[reserve.key]
            assert sender is not None
            cached = reserve.num_cached_blocks * self._setup.block_size
            granted = Granted(
                key=reserve.key, num_cached_tokens=cached, num_tokens=reserve.num_tokens
            )
            self.clock.after(self._message_s, sender.tell, granted)
        for handoff in out.sends:
            if isinstance(handoff, Push) and handoff.key.attempt:  # of a move
                seconds = len(handoff.block_ids) * self._setup.block_size * _MOVED_TOKEN_S
                self.clock.after(seconds, worker.tell, Sent(key=handoff.key))
            if isinstance(handoff, CommitHandoff):
                self._commit(worker, handoff)
            elif isinstance(handoff, AnnounceCommit):
                announced = CommitAnnounced(key=handoff.key, at=handoff.at)
                self.clock.after(self._message_s, self._pairs[handoff.key][0].tell, announced)
            elif isinstance(handoff, EndHandoff):
                ended = HandoffEnded(key=handoff.key, error=handoff.error)
                self._stay(handoff.key)
                for informed in (self._pairs[handoff.key][0], worker):
                    self.clock.after(self._message_s, informed.tell, ended)
                receiver = self._pairs[handoff.key][0]
                self.clock.after(3 * self._message_s, receiver.tell, BlocksSafe(key=handoff.key))

    def _deliver(self, worker: Worker, events: RouterEvents) -> None:
        """Let the router have what a worker reports."""
        for token in events.tokens:
            self.clock.after(self._message_s, self._token, token)
        for prompt in events.prompts:
            self.clock.after(self._message_s, worker.reservations.computed, prompt.key)
        for failure in events.failures:
            if failure.given_back:
                self.clock.after(self._message_s, self._given_back, failure.key)
            else:  # a move for which the sequence did not run yet: it stays
                stays = self._submits.get(failure.key.request_id)
                assert stays is None or stays.key != failure.key, failure

    def _look_at_queues(self) -> None:
        """Ask a worker for a prompt that is late there and would be in time elsewhere."""
        if not self._setup.router.local_gain_s or self.clock.now < self._next_look:
            return
        self._next_look = self.clock.now + LOOK_S
        coming: Counter[Worker] = Counter()
        for target, tokens in self._asked.values():
            coming[target] += tokens
        queues = {worker: worker.queue(self._layout, coming[worker]) for worker in self.workers}
        found = find_move(queues, lambda key, _worker: key in self._movable)
        if found is not None:
            key, tokens, source, target = found
            self._movable.discard(key)
            self._asked[key] = target, tokens
            back = RequestCancelled(keys=(key,), unless_begun=True)
            self.clock.after(self._message_s, source.tell, back)
            self.clock.after(ASKED_S, self._forget, key)

    def _forget(self, key: RequestKey) -> None:
        self._asked.pop(key, None)

    def _given_back(self, key: RequestKey) -> None:
        """Place a prompt anew; what its decode worker holds for it is freed."""
        submit, asked = self._submits[key.request_id], self._asked.pop(key, None)
        for worker in self._pairs[key]:
            if worker is not None:
                worker.reservations.release(key)
        again = RequestKey(key.request_id, key.attempt + 1)
        self._requests[key.request_id].num_moves += 1
        self._place(again, submit.prompt_ids, submit.gap_s, submit.first_s, asked and asked[0].ref)
        if again.attempt >= MAX_GIVEN_BACK:
            self._movable.discard(again)

    def _stay(self, key: RequestKey) -> None:
        """A move has failed, or the sequence has ended before it: it is tried again soon."""
        submit = self._submits.get(key.request_id)
        if submit is not None and submit.key == key and submit.live:
            before = RequestKey(key.request_id, key.attempt - 1)
            self._requests[key.request_id].moving = False
            stays = self._submits[key.request_id] = replace(submit, key=before)
            self.clock.after(_RETRY_S, self._unload, stays)

    def _commit(self, prefill: Worker, handoff: CommitHandoff) -> None:
        decode, _ = self._pairs[handoff.key]
        committed = Committed(key=handoff.key, tokens=handoff.tokens, held=handoff.held)
        delays, prompt = self._setup.delays, self._submits[handoff.key.request_id].prompt_ids
        took_s = delays.commit_s + delays.commit_token_s * len(prompt)
        took_s *= self._rng.uniform(*delays.commit_spread)
        self.clock.after(took_s, decode.tell, committed)
        now = self.clock.now
        report = TransferReport(start=now, end=now + took_s, num_bytes=0, num_pieces=0)
        self.clock.after(took_s, prefill.tell, Delivered(key=handoff.key, report=report))

    def _token(self, event: TokenEvent) -> None:
        request = self._requests[event.key.request_id]
        request.times.append(self.clock.now)
        submit = self._submits[event.key.request_id]
        if submit.key == event.key:
            request.moving = False
            self._unload(submit)
        for worker in self._pairs[event.key]:
            if worker is None:
                continue
            if len(request.times) == 1:
                worker.reservations.computed(event.key)
            if event.finish is not None:
                worker.reservations.release(event.key)
        if event.finish is not None:
            self._submits.pop(event.key.request_id, None)
