"""A decode worker: grants blocks, receives KV, decodes, streams tokens to the routers."""

from __future__ import annotations

from decode_worker.lifecycle import (
    BlocksSafe,
    Command,
    CommitAnnounced,
    Committed,
    DecodeOutput,
)
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.receiver import Receiver
from protocol.errors import ErrorInfo, Internal, InvalidRequest
from protocol.ids import RequestKey, Role
from protocol.messages import Commit, Submit
from worker_runtime.scheduling.messages import HandoffEnded
from worker_runtime.worker import Worker


class DecodeWorker(Worker[Command, DecodeOutput, Receiver]):
    """One replica of the decode pool; the listener of its receiver."""

    role = Role.DECODE
    whole_output = True
    scheduler = DecodeScheduler

    async def _open_handoff(self, context: EndpointContext) -> Receiver:
        receiver = Receiver(context, self)
        await receiver.start()
        return receiver

    def _accept(self, submit: Submit) -> None:
        if submit.peer is None:
            return
        if submit.ticket is None:  # the hand-off would never end
            raise InvalidRequest("a request with a peer needs a ticket", param="ticket")
        self._handoff.offer(submit.key, submit.ticket, submit.peer)

    def _carry_out(self, out: DecodeOutput) -> None:
        for reserve in out.reserves:
            self.tasks.start(
                self._handoff.reserve(
                    reserve.key,
                    reserve.block_tables,
                    reserve.num_cached_blocks,
                    reserve.num_tokens,
                )
            )
        for end in out.ends:
            self.tasks.start(self._handoff.end(end.key, end.released, end.error))

    # --- the receiver's listener, on the event loop -----------------------------------------------

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        """Prefill has launched the last chunk."""
        self.inbox.put(CommitAnnounced(key=key, at=self.clock() + in_s))

    def committed(self, key: RequestKey, commit: Commit) -> None:
        token = commit.first_token
        if 0 <= token < self.ranks.executor.vocab_size:
            self.inbox.put(Committed(key=key, first_token=token))
            return
        # It would break the engine, for all requests.
        error = Internal(f"prefill's first token is {token}", param="first_token").info()
        self.ended(key, error)
        self.tasks.start(self._handoff.end(key, False, error))

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        """Further writes of this hand-off are refused."""
        self.inbox.put(HandoffEnded(key=key, error=error))

    def blocks_safe(self, key: RequestKey, _block_ids: tuple[int, ...]) -> None:
        """No write of this hand-off can be in flight any more."""
        self.inbox.put(BlocksSafe(key=key))
