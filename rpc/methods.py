"""Every control method of the cluster, declared once for both sides."""

from __future__ import annotations

from protocol.messages import (
    Ack,
    Cancel,
    Commit,
    DrainCommand,
    EventBatch,
    Grant,
    HandoffEnd,
    Meeting,
    Piece,
    StatusQuery,
    Submit,
    Subscribe,
    Welcome,
    WorkerStatus,
)
from rpc.service import Method

_WORKER = "baton.worker.v1.Worker"
_HANDOFF = "baton.handoff.v1.Handoff"

# router -> any worker
SUBMIT = Method(_WORKER, "Submit", Submit, Ack)
CANCEL = Method(_WORKER, "Cancel", Cancel, Ack)
EVENTS = Method(_WORKER, "Events", Subscribe, EventBatch, streams=True)
STATUS = Method(_WORKER, "Status", StatusQuery, WorkerStatus)
DRAIN = Method(_WORKER, "Drain", DrainCommand, Ack)

# decode -> prefill
GRANT = Method(_HANDOFF, "Grant", Grant, Ack)
# prefill -> decode
MEET = Method(_HANDOFF, "Meet", Meeting, Welcome)
PIECE = Method(_HANDOFF, "Piece", Piece, Ack)
COMMIT = Method(_HANDOFF, "Commit", Commit, Ack)
# either way
END = Method(_HANDOFF, "End", HandoffEnd, Ack)
