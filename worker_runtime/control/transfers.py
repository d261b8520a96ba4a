"""The event loop's half of hand-offs: between the ends of kv_transfer and the schedulers."""

from __future__ import annotations

from collections.abc import Callable

from concurrency.event_loop import Tasks
from kv_transfer.control.context import EndpointContext
from kv_transfer.control.handoffs import Handoffs
from kv_transfer.control.listeners import TransferReport
from observability.logging import get_logger
from protocol.errors import BatonError, ErrorInfo, Internal, InvalidRequest
from protocol.ids import RequestKey, Role
from protocol.messages import Commit, Grant, MoveRequest
from worker_runtime.control.loans import Loans, granted_of
from worker_runtime.scheduling.messages import (
    AnnounceCommit,
    BlocksSafe,
    Command,
    CommitAnnounced,
    CommitHandoff,
    Committed,
    Delivered,
    EndHandoff,
    HandoffEnded,
    MoveOut,
    Push,
    SendOrder,
    Sent,
    StepOutput,
    Submitted,
)
from worker_runtime.step_loop import Inbox

log = get_logger(__name__)


class Transfers:
    """The hand-offs of one worker: announces requests to them, carries out what the schedulers
    decide, and is the listener that tells the schedulers what became of it."""

    def __init__(
        self,
        context: EndpointContext,
        inbox: Inbox[Command],
        tasks: Tasks,
        *,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.handoffs = Handoffs(context, self)
        self.loans = Loans(context, self.handoffs, inbox.put, tasks)
        self._inbox = inbox
        self._tasks = tasks
        self._vocab_size = vocab_size
        self._clock = clock  # of the step thread

    # --- from the control service ---------------------------------------------------------------

    def accept(self, command: Submitted) -> int:
        """Announce a request to the hand-off, or refuse it with a typed error."""
        submit = command.submit
        if submit.peer is not None:
            if submit.ticket is None:  # the hand-off would never end
                raise InvalidRequest("a request with a peer needs a ticket", param="ticket")
            if command.role is Role.PREFILL:
                self.handoffs.sender.expect(submit.key, submit.ticket, submit.peer)
            else:
                self.handoffs.receiver.offer(submit.key, submit.ticket, submit.peer)
        return self._inbox.put(command)

    def move(self, move: MoveRequest) -> int:
        """Announce that a running sequence leaves, or refuse with a typed error."""
        self.handoffs.sender.expect(move.to, move.ticket, move.peer, live=True)
        return self._inbox.put(MoveOut(key=move.key, to=move.to, num_output=move.num_output))

    # --- from the schedulers --------------------------------------------------------------------

    def carry_out(self, out: StepOutput) -> None:
        """Carry out the schedulers' decisions about hand-offs; `loans` has done its part."""
        receiver = self.handoffs.receiver
        for order in out.sends:
            try:
                self._send(order)
            except (BatonError, ValueError) as error:  # the other hand-offs go on
                log.exception("hand-off failed")
                failure = Internal(f"{type(error).__name__}: {error}").info()
                self._tasks.start(self.handoffs.sender.end(order.key, False, failure))
        for reserve in out.reserves:
            tables, num_cached = reserve.block_tables, reserve.num_cached_blocks
            self._tasks.start(receiver.reserve(reserve.key, tables, num_cached, reserve.num_tokens))
        for end in out.ends:
            self._tasks.start(receiver.end(end.key, end.released, end.error))

    def _send(self, order: SendOrder) -> None:
        sender = self.handoffs.sender
        match order:
            case Push():
                blocks, first_block = order.block_ids, order.first_block
                sender.push(order.key, blocks, first_block, group=order.group, after=order.after)
            case AnnounceCommit(key=key, at=at):
                # The launch itself took a part of the time, on a GPU up to 20 ms.
                sender.announce_commit(key, max(0.0, at - self._clock()))
            case CommitHandoff(key=key, tokens=tokens, held=held):
                sender.commit(key, tokens, held=held)
            case EndHandoff(key=key, released=released, error=error):
                self._tasks.start(sender.end(key, released, error))

    # --- the listener of both ends, on the event loop -------------------------------------------

    def granted(self, key: RequestKey, grant: Grant) -> None:
        """The receiver allocated blocks for this request."""
        self._inbox.put(granted_of(grant))

    def sent(self, key: RequestKey) -> None:
        """All pushed blocks of a running sequence are sent."""
        self._inbox.put(Sent(key=key))

    def delivered(self, key: RequestKey, report: TransferReport) -> None:
        """The receiver owns the sequence; the source blocks are free."""
        self._inbox.put(Delivered(key=key, report=report))

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        """The sender has launched the last chunk."""
        self._inbox.put(CommitAnnounced(key=key, at=self._clock() + in_s))

    def committed(self, key: RequestKey, commit: Commit) -> None:
        """All KV arrived: the sequence is this worker's."""
        if all(0 <= token < self._vocab_size for token in commit.tokens):
            self._inbox.put(Committed(key=key, tokens=commit.tokens, held=commit.held))
            return
        # It would break the engine, for all requests.
        error = Internal(f"the sender's tokens are {commit.tokens}", param="tokens").info()
        self.ended(key, error)
        self._tasks.start(self.handoffs.receiver.end(key, False, error))

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool = False) -> None:
        """A hand-off is over without a commit. Sent: no rank reads the source blocks. Received:
        further writes are refused."""
        self.loans.ended(key)
        self._inbox.put(HandoffEnded(key=key, error=error, uncertain=uncertain))

    def blocks_safe(self, key: RequestKey, _block_ids: tuple[int, ...]) -> None:
        """No write of this hand-off can be in flight any more."""
        self._inbox.put(BlocksSafe(key=key))
