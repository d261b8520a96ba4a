"""Messages between workers about KV that one has and the other needs."""

from __future__ import annotations

from protocol.ids import RequestKey, WorkerRef
from protocol.message import Message
from protocol.messages import Ticket


class LoanRequest(Message):
    """To a worker that may have KV: keep what you have of these tokens, in the pool or in host
    memory, until the hand-off of `key` is over, which brings it to `borrower`. The last token is
    not asked for: its KV is computed. Only names with `cache_salt` count."""

    key: RequestKey
    ticket: Ticket
    borrower: WorkerRef
    cache_salt: str = ""
    tokens: tuple[int, ...]


class LoanOffer(Message):
    """The answer: the KV of the first `num_tokens` tokens is kept; 0: none, and the hand-off is
    over."""

    num_tokens: int
