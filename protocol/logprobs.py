"""Log-probabilities of tokens, as they travel from engine to client."""

from __future__ import annotations

from protocol.message import Message

#: Stands for anything lower, minus infinity included: JSON has no infinities.
LOWEST_LOGPROB = -9999.0


class TokenLogprobs(Message):
    """How likely the model held one token, and the likeliest ones at its place.

    They are the model's own, in float32: before biases, penalties, temperature and filters. All are
    finite. `rank` is 1 for the likeliest token; `top_ids` are in order, likeliest first.
    """

    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    logprob: float
    rank: int
