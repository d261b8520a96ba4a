"""What Sender and Receiver tell their worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.errors import ErrorInfo
from protocol.ids import RequestKey
from protocol.messages import Commit, Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What a committed hand-off has moved, and when (seconds since the Unix epoch): from the first
    announcement to the commit's acknowledgement."""

    num_bytes: int
    num_pieces: int
    start: float
    end: float


class SenderListener(Protocol):
    """The worker that sends. Called on the event loop; must not block.

    Of `delivered` and `ended` exactly one is called for every hand-off that was expected, once.
    After that call no rank reads the source blocks: they may be freed.
    """

    def granted(self, key: RequestKey, grant: Grant) -> None:
        """Decode holds blocks: the prompt may run."""

    def sent(self, key: RequestKey) -> None:
        """All blocks of a live hand-off are pushed and sent: only the commit is missing."""

    def delivered(self, key: RequestKey, report: TransferReport) -> None:
        """Decode has everything and owns the sequence."""

    def ended(self, key: RequestKey, error: ErrorInfo | None, *, uncertain: bool) -> None:
        """Over without a commit; `error` is None when the hand-off was merely not needed.
        `uncertain`: a commit was sent and not refused, so that decode may own the sequence."""


class ReceiverListener(Protocol):
    """The worker that receives. Called on the event loop; must not block.

    Of `committed` and `ended` exactly one is called for every hand-off that was offered, once.
    Block ids given to `reserve` come back exactly once: with `committed`, and then the worker owns
    blocks and KV; or through `blocks_safe`.
    """

    def commit_announced(self, key: RequestKey, in_s: float) -> None:
        """The commit will come in about `in_s` seconds, if nothing fails."""

    def committed(self, key: RequestKey, commit: Commit) -> None:
        """All KV arrived and was checked: the sequence is decode's."""

    def ended(self, key: RequestKey, error: ErrorInfo | None) -> None:
        """Over without a commit: no more writes will be accepted, but one may be in flight until
        `blocks_safe`. `error` is None when the hand-off was merely not needed."""

    def blocks_safe(self, key: RequestKey, block_ids: tuple[int, ...]) -> None:
        """No write can be in flight to these blocks: they may be used again."""
