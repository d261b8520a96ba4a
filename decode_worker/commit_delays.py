"""How long after its announced time a commit is here. Pure."""

from __future__ import annotations

from collections import deque
from statistics import fmean, linear_regression

#: From the end of a prompt's last chunk until its commit is here, before any was seen.
_UNMEASURED_S = 0.0025
#: The last commits, and how many there must be, for a line through them.
_HISTORY = 64
_MIN_SEEN = 8
#: Sum of squared distances of their tokens from the mean, from which on the line has a slope: times
#: scatter by 1 ms, which gives a slope of 0.3 us a token then, half of what a token takes.
_MIN_SPREAD = 1e7
#: A commit that comes later than this beyond its time says nothing about others.
_MAX_DELAY_S = 0.02


class CommitDelays:
    """Seconds between the end of a prompt's last chunk, as the prefill worker predicts it, and its
    commit here: a constant (messages, checks) and a time a token (its KV is still on the link), the
    least-squares line through the last commits; their mean where those are too alike to tell."""

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=_HISTORY)
        self._seconds: deque[float] = deque(maxlen=_HISTORY)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A commit of so many received tokens came so long after its announced time."""
        if abs(seconds) <= _MAX_DELAY_S:
            self._tokens.append(float(num_tokens))
            self._seconds.append(seconds)

    def expected_s(self, num_tokens: int) -> float:
        """The delay of the next commit, of so many received tokens; never negative."""
        if len(self._tokens) < _MIN_SEEN:
            return _UNMEASURED_S
        slope, constant, mean = 0.0, fmean(self._seconds), fmean(self._tokens)
        if sum((tokens - mean) ** 2 for tokens in self._tokens) >= _MIN_SPREAD:
            slope, constant = linear_regression(self._tokens, self._seconds)
        return min(_MAX_DELAY_S, max(0.0, constant + slope * num_tokens))
