"""Life cycles and the only transitions they allow."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import StaleMessage


class WorkerState(StrEnum):
    """Life of a worker. READY follows a warm-up step."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class TransferState(StrEnum):
    """Life of one hand-off, on either side."""

    OFFERED = "offered"  # known; decode holds no blocks
    RESERVED = "reserved"  # decode holds blocks and has sent the grant
    MOVING = "moving"  # at least one piece was announced
    COMMITTED = "committed"  # every block arrived; decode owns the sequence
    RELEASED = "released"  # nothing is held; the hand-off was used or not needed
    ABORTED = "aborted"  # nothing is held; the hand-off failed


class FinishReason(StrEnum):
    """Why a sequence ended. TOOL_CALLS is the router's: a STOP after tool calls."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.READY, WorkerState.STOPPED}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.STOPPED}),
    WorkerState.DRAINING: frozenset({WorkerState.STOPPED}),
    WorkerState.STOPPED: frozenset(),
}

_ENDED = frozenset({TransferState.RELEASED, TransferState.ABORTED})
TRANSFER_TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    TransferState.OFFERED: _ENDED | {TransferState.RESERVED},
    TransferState.RESERVED: _ENDED | {TransferState.MOVING, TransferState.COMMITTED},
    TransferState.MOVING: _ENDED | {TransferState.COMMITTED},
    TransferState.COMMITTED: _ENDED,
    TransferState.RELEASED: frozenset(),
    TransferState.ABORTED: frozenset(),
}


def check_transfer(current: TransferState, target: TransferState) -> None:
    """Raise StaleMessage unless the table allows the step."""
    if target not in TRANSFER_TRANSITIONS[current]:
        raise StaleMessage(f"hand-off is {current}, cannot become {target}")


def check_worker(current: WorkerState, target: WorkerState) -> None:
    """Raise StaleMessage unless the table allows the step."""
    if target not in WORKER_TRANSITIONS[current]:
        raise StaleMessage(f"worker is {current}, cannot become {target}")
