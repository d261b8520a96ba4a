"""Messages between workers about KV that one has and the other needs."""

from __future__ import annotations

from protocol.message import Message
from protocol.messages import Grant


class LoanRequest(Message):
    """To a worker that may have KV: keep what you have of these blocks, in the pool or in host
    memory, until the hand-off of `grant` is over, which brings it to the borrower. A lender that
    has all of it takes the grant and sends; one that has less does not.

    names: of the full blocks. tokens: theirs and one more, only for a lender whose blocks have
    another size and which refused the request without them, naming `tokens`; it names its blocks
    with `cache_salt`."""

    grant: Grant
    cache_salt: str = ""
    names: tuple[bytes, ...]
    tokens: tuple[int, ...] = ()


class LoanOffer(Message):
    """The answer: the KV of the first `num_tokens` tokens is kept. With fewer than were granted the
    grant was not taken: the hand-off goes on with another, or is over (0)."""

    num_tokens: int
