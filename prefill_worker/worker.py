"""A prefill worker: runs prompts in chunks, pushes their KV out, streams token 1 to the routers."""

from __future__ import annotations

from engine.ranks import RankGroup
from kv_transfer.sender import Sender, TransferReport
from observability.logging import get_logger
from prefill_worker.commands import (
    Command,
    CommitHandoff,
    Delivered,
    Granted,
    Output,
    Push,
)
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import BatonError, ErrorInfo, Internal, InvalidRequest
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Grant, Submit, WorkerStatus
from rpc import methods
from worker_runtime.clock import Clock, wall_clock
from worker_runtime.commands import EndHandoff, HandoffEnded
from worker_runtime.host import WorkerHost, WorkerSettings
from worker_runtime.scheduler import Snapshot

log = get_logger(__name__)


class PrefillWorker:
    """One replica of the prefill pool: an engine (one or more ranks), a scheduler, a sender.

    All methods belong to the event loop that `start` runs on. `group` holds the follower ranks
    when the engine is tensor parallel; the worker closes it.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        group: RankGroup | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        self._host: WorkerHost[Command, Output] = WorkerHost(settings, group=group, clock=clock)
        self._sender: Sender

    async def start(self) -> WorkerRef:
        """Load the model, run a real step, serve. Returns once the worker is ready for requests."""
        host, settings = self._host, self._host.settings
        ref = await host.load(Role.PREFILL)
        executor = host.ranks.executor
        self._sender = Sender(host.party, self)
        scheduler = PrefillScheduler(
            config=settings.worker,
            blocks=host.blocks,
            fingerprint=executor.fingerprint,
            place=settings.worker_id,
        )
        await host.serve(
            scheduler,
            deliver=self._deliver,
            accept=self._accept,
            whole_output=False,
            handlers={
                methods.GRANT: self._sender.on_grant,
                methods.END: self._sender.on_end,
            },
            handoff_counters=self._sender.stats.counters,
        )
        return ref

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, finish the old; False when `timeout_s` passed first."""
        return await self._host.drain(timeout_s)

    async def stop(self) -> None:
        """End at once: running requests fail for their routers, which resume them elsewhere."""
        await self._host.stop(self._sender.close)

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or hangs."""
        self._host.check_health()

    def peers_left(self, epochs: frozenset[int]) -> None:
        """These workers have left the cluster, or are silent: end hand-offs to them now."""
        for epoch in epochs:
            self._host.tasks.start(self._sender.peer_lost(epoch))

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        """These workers take requests: get the links to decode workers ready."""
        for ref in workers:
            if ref.role is Role.DECODE:
                self._host.tasks.start(self._sender.meet(ref))

    def status(self) -> WorkerStatus:
        """This worker as it is now."""
        return self._host.status()

    def _accept(self, submit: Submit) -> None:
        if submit.peer is None or submit.ticket is None:
            raise InvalidRequest("a prefill worker needs a peer and a ticket", param="peer")
        self._sender.expect(submit.key, submit.ticket, submit.peer)

    def _deliver(self, out: Output, snapshot: Snapshot, accepted: int) -> None:
        """Carry out what the step thread decided; runs on the event loop. Token 1 goes out
        first."""
        self._host.shell.deliver(out.events, snapshot, accepted)
        for handoff in out.handoffs:
            try:
                self._carry_out(handoff)
            except (BatonError, ValueError) as error:  # the others of this turn go on
                log.exception("a hand-off cannot go on")
                failure = Internal(f"{type(error).__name__}: {error}").info()
                self._host.tasks.start(self._sender.end(handoff.key, False, failure))

    def _carry_out(self, handoff: Push | CommitHandoff | EndHandoff) -> None:
        match handoff:
            case Push(key=key, block_ids=block_ids, first_block=first, after=step):
                self._sender.push(key, block_ids, first, len(block_ids), after=step)
            case CommitHandoff(key=key, first_token=token):
                self._sender.commit(key, token)
            case EndHandoff(key=key, released=released, error=error):
                self._host.tasks.start(self._sender.end(key, released, error))

    # --- the sender's listener, on the event loop -------------------------------------------------

    def granted(self, key: RequestKey, grant: Grant) -> None:
        """Decode holds blocks for this request."""
        self._host.inbox.put(
            Granted(
                key=key,
                num_cached_tokens=grant.num_cached_blocks * grant.layout.block_size,
            )
        )

    def committed(self, key: RequestKey, report: TransferReport) -> None:
        """Decode owns the sequence; the source blocks are free."""
        self._host.inbox.put(
            Delivered(
                key=key,
                num_bytes=report.num_bytes,
                num_pieces=report.num_pieces,
                start=report.start,
                end=report.end,
            )
        )

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        """The hand-off is over without a commit; the source blocks are free."""
        self._host.inbox.put(HandoffEnded(key=key, error=error))
