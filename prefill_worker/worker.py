"""A prefill worker: runs prompts in chunks, pushes their KV, streams token 1 to the routers."""

from __future__ import annotations

from kv_transfer.control.context import EndpointContext
from kv_transfer.control.listeners import TransferReport
from kv_transfer.control.sender import Sender
from observability.logging import get_logger
from prefill_worker.lifecycle import (
    AnnounceCommit,
    Command,
    CommitHandoff,
    Delivered,
    Granted,
    HandoffAction,
    PrefillOutput,
    Push,
)
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import BatonError, ErrorInfo, Internal, InvalidRequest
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.messages import Grant, Submit
from worker_runtime.scheduling.messages import EndHandoff, HandoffEnded
from worker_runtime.worker import Worker

log = get_logger(__name__)


class PrefillWorker(Worker[Command, PrefillOutput, Sender]):
    """One replica of the prefill pool; the listener of its sender."""

    role = Role.PREFILL
    whole_output = False
    scheduler = PrefillScheduler

    def peers_joined(self, workers: tuple[WorkerRef, ...]) -> None:
        for ref in workers:
            if ref.role is Role.DECODE:
                self.tasks.start(self._handoff.warm_up(ref))

    async def _open_handoff(self, context: EndpointContext) -> Sender:
        return Sender(context, self)

    def _accept(self, submit: Submit) -> None:
        if submit.peer is None or submit.ticket is None:
            raise InvalidRequest("a prefill request needs a peer and a ticket", param="peer")
        self._handoff.expect(submit.key, submit.ticket, submit.peer)

    def _carry_out(self, out: PrefillOutput) -> None:
        for handoff in out.handoffs:
            try:
                self._carry_out_one(handoff)
            except (BatonError, ValueError) as error:  # the other hand-offs go on
                log.exception("hand-off failed")
                failure = Internal(f"{type(error).__name__}: {error}").info()
                self.tasks.start(self._handoff.end(handoff.key, False, failure))

    def _carry_out_one(self, handoff: HandoffAction) -> None:
        match handoff:
            case Push():
                self._handoff.push(
                    handoff.key,
                    handoff.block_ids,
                    handoff.first_block,
                    group=handoff.group,
                    after=handoff.after,
                )
            case AnnounceCommit(key=key, in_s=in_s):
                self._handoff.announce_commit(key, in_s)
            case CommitHandoff(key=key, first_token=token):
                self._handoff.commit(key, token)
            case EndHandoff(key=key, released=released, error=error):
                self.tasks.start(self._handoff.end(key, released, error))

    # --- the sender's listener, on the event loop -------------------------------------------------

    def granted(self, key: RequestKey, grant: Grant) -> None:
        """Decode allocated blocks for this request."""
        self.inbox.put(
            Granted(
                key=key,
                num_cached_tokens=grant.num_cached_blocks * grant.layout.block_size,
            )
        )

    def committed(self, key: RequestKey, report: TransferReport) -> None:
        """Decode owns the sequence; the source blocks are free."""
        self.inbox.put(Delivered(key=key, report=report))

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        """The hand-off is over without a commit; the source blocks are free."""
        self.inbox.put(HandoffEnded(key=key, error=error))
