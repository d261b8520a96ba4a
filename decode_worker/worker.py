"""A decode worker: grants block credits, takes KV in, decodes, streams tokens to the routers."""

from __future__ import annotations

from decode_worker.commands import BlocksSafe, Command, Committed, Output
from decode_worker.scheduler import DecodeScheduler
from engine.ranks import RankGroup
from kv_transfer.receiver import Receiver
from protocol.errors import ErrorInfo, InvalidRequest
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Commit, Submit, WorkerStatus
from rpc import methods
from worker_runtime.clock import Clock, wall_clock
from worker_runtime.commands import HandoffEnded
from worker_runtime.host import WorkerHost, WorkerSettings
from worker_runtime.scheduler import Snapshot


class DecodeWorker:
    """One replica of the decode pool: an engine (one or more ranks), a scheduler, a receiver.

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
        self._receiver: Receiver

    async def start(self) -> WorkerRef:
        """Load the model, run a real step, serve. Returns once the worker is ready for requests."""
        host, settings = self._host, self._host.settings
        ref = await host.load(Role.DECODE)
        executor = host.ranks.executor
        self._receiver = Receiver(host.party, self)
        await self._receiver.start()
        scheduler = DecodeScheduler(
            config=settings.worker,
            blocks=host.blocks,
            fingerprint=executor.fingerprint,
            place=settings.worker_id,
        )
        await host.serve(
            scheduler,
            deliver=self._deliver,
            accept=self._accept,
            whole_output=True,
            handlers={
                methods.MEET: self._receiver.on_meet,
                methods.PIECE: self._receiver.on_piece,
                methods.COMMIT: self._receiver.on_commit,
                methods.END: self._receiver.on_end,
            },
            handoff_counters=self._receiver.stats.counters,
        )
        return ref

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, finish the old; False when `timeout_s` passed first."""
        return await self._host.drain(timeout_s)

    async def stop(self) -> None:
        """End at once: running requests fail for their routers, which resume them elsewhere."""
        await self._host.stop(self._receiver.close)

    def check_health(self) -> None:
        """Raise Internal when the engine is broken or hangs."""
        self._host.check_health()

    def peers_left(self, epochs: frozenset[int]) -> None:
        """These workers have left the cluster, or are silent: end hand-offs from them now."""
        for epoch in epochs:
            self._host.tasks.start(self._receiver.peer_lost(epoch, dead=False))

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        """These workers take requests: prefill ones say what they want of this one."""

    def status(self) -> WorkerStatus:
        """This worker as it is now."""
        return self._host.status()

    def _accept(self, submit: Submit) -> None:
        if submit.peer is None:
            return
        if submit.ticket is None:  # nobody would ever end the hand-off that it waits for
            raise InvalidRequest("a request with a peer needs a ticket", param="ticket")
        self._receiver.offer(submit.key, submit.ticket, submit.peer)

    def _deliver(self, out: Output, snapshot: Snapshot, accepted: int) -> None:
        """Carry out what the step thread decided; runs on the event loop."""
        self._host.shell.deliver(out.events, snapshot, accepted)
        for reserve in out.reserves:
            self._host.tasks.start(
                self._receiver.reserve(
                    reserve.key,
                    reserve.block_ids,
                    reserve.num_cached_blocks,
                    reserve.num_tokens,
                )
            )
        for end in out.ends:
            self._host.tasks.start(self._receiver.end(end.key, end.released, end.error))

    # --- the receiver's listener, on the event loop -----------------------------------------------

    def committed(self, key: RequestKey, commit: Commit) -> None:
        """All KV arrived."""
        self._host.inbox.put(Committed(key=key, first_token=commit.first_token))

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        """No more writes of this hand-off will be accepted."""
        self._host.inbox.put(HandoffEnded(key=key, error=error))

    def blocks_safe(self, key: RequestKey, _block_ids: tuple[int, ...]) -> None:
        """No write of this hand-off can be in flight any more."""
        self._host.inbox.put(BlocksSafe(key=key))
