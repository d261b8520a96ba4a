"""How long a step takes, learned from the steps that ran. Pure.

A step that mixes decode rows with prompt tokens takes a constant (weights are read, kernels are
launched), a time a prompt token (arithmetic), a time a context token of the decode rows (their KV
is read) and a time a pair of prompt token and earlier token (attention). The four are fitted by
recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory, chapter 10),
so the model follows what the device does now.

Where an engine runs steps in some numbers of rows only, a step takes as long as if it had the next
of them, and each of them takes something of its own more or less: products come in tiles.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

#: Mixed steps seen before the model is trusted: the first ones compile, allocate and warm caches.
_MIN_STEPS = 8
#: Weight of the steps before, each time one is added: about the last hundred count.
_FORGETTING = 0.99
#: Uncertainty of each coefficient, relative to its scale, before anything is measured.
_PRIOR = 100.0
#: Total uncertainty beyond which nothing more is forgotten.
_MAX_TRACE = 0.3
#: What a number of rows takes by itself: the share of an error that it learns at once, and the
#: share of it that is forgotten with each such step, so that the fit explains what it can.
_LEARNED, _FORGOTTEN = 0.1, 0.02
#: The share of what the other numbers of rows take more that each step forgets: those that a slow
#: device has made too long to be chosen are tried again. A tenth is left after 1,150 steps.
_RETRIED = 0.003
#: A number of rows that computes so much less a second than a smaller one is left out: products of
#: 528 rows take 1.15 times as long as those of 512.
_CLEARLY = 0.99
#: How much larger a step may be than the largest that ran.
_GROWTH = 1.5
#: A step this many times longer or shorter than predicted is an outlier, a stall of the host for
#: example, and teaches nothing.
_OUTLIER_FACTOR = 4.0
#: After so many outliers in a row the model is wrong: it was fitted to stalls, or the device has
#: changed its speed. It starts over.
_MAX_OUTLIERS = 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step runs: `num_decodes` sequences with `context` tokens together, and
    `num_prompt_tokens` tokens of prompts, which attend to `num_pairs` (token, earlier) pairs."""

    num_decodes: int = 0
    context: int = 0
    num_prompt_tokens: int = 0
    num_pairs: int = 0

    @property
    def rows(self) -> int:
        """Of the step's products."""
        return self.num_decodes + self.num_prompt_tokens

    def features(self, rows: int) -> tuple[float, float, float, float]:
        """The regressors of it as a step of `rows`, scaled to the order of one."""
        return 1.0, rows / 1e3, self.context / 1e5, self.num_pairs / 1e6


class StepModel:
    """Seconds of a step that has prompt tokens in it."""

    def __init__(self, step_rows: Sequence[int] = ()) -> None:
        """`step_rows`: numbers of rows, ascending, that steps with prompt tokens are rounded up to;
        larger ones are not."""
        self._step_rows = tuple(step_rows)
        self.largest_rounded = max(step_rows, default=0)
        self._reset()

    def _reset(self) -> None:
        self._extra = dict.fromkeys(self._step_rows, 0.0)  # seconds of that number of rows
        size = len(StepWork().features(0))
        self._weights = [0.0] * size
        self._covariance = [[_PRIOR * (i == j) for j in range(size)] for i in range(size)]
        self._num_steps = 0
        self._num_outliers = 0  # in a row
        self._largest = 0  # prompt tokens of a step so far

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict others."""
        return self._num_steps >= _MIN_STEPS

    def predict(self, shape: StepWork) -> float:
        """Seconds of such a step. Coefficients below zero, noise of the fit, count as zero."""
        rows = self._rounded(shape)
        extra = self._extra.get(rows, 0.0) if shape.num_prompt_tokens else 0.0
        return self._seconds(shape.features(rows), extra)

    def _seconds(self, features: tuple[float, float, float, float], extra: float) -> float:
        """Of a step with these features. Written out: a plan asks for a dozen numbers of rows."""
        base, row, context, pair = self._weights
        one, rows, tokens, pairs = features
        fitted = max(0.0, base) * one + max(0.0, row) * rows
        fitted += max(0.0, context) * tokens + max(0.0, pair) * pairs
        return max(0.0, fitted + extra)

    def _rounded(self, shape: StepWork) -> int:
        """The rows that such a step runs with."""
        at = bisect_left(self._step_rows, shape.rows)
        if at == len(self._step_rows) or not shape.num_prompt_tokens:
            return shape.rows
        return self._step_rows[at]

    def add(self, shape: StepWork, seconds: float) -> None:
        """Take in a step that ran. Steps without prompt tokens are another regime: ignored."""
        if not shape.num_prompt_tokens or not 0.0 < seconds < math.inf:
            return
        if self._is_outlier(shape, seconds):
            self._num_outliers += 1
            if self._num_outliers < _MAX_OUTLIERS:
                return
            self._reset()
        self._num_outliers = 0
        self._num_steps += 1
        self._largest = max(self._largest, shape.num_prompt_tokens)
        rows = self._rounded(shape)
        x = shape.features(rows)
        gain = [sum(row[j] * x[j] for j in range(len(x))) for row in self._covariance]
        scale = _FORGETTING + sum(g * v for g, v in zip(gain, x, strict=True))
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        if rows in self._extra:
            extra = self._extra[rows]
            extra += _LEARNED * (error - extra) - _FORGOTTEN * extra
            self._extra[rows], error = extra, error - extra
        for other in self._step_rows:
            if other != rows and self._extra[other] > 0.0:
                self._extra[other] *= 1.0 - _RETRIED
        self._weights = [w + g / scale * error for w, g in zip(self._weights, gain, strict=True)]
        settled = [
            [value - gain[i] * gain[j] / scale for j, value in enumerate(row)]
            for i, row in enumerate(self._covariance)
        ]
        # Equal steps say nothing about other shapes: forgetting then would let one odd step undo
        # what was learned of those (covariance wind-up).
        trace = sum(settled[i][i] for i in range(len(x)))
        keep = _FORGETTING if trace < _MAX_TRACE else 1.0
        self._covariance = [[value / keep for value in row] for row in settled]

    def _is_outlier(self, shape: StepWork, seconds: float) -> bool:
        predicted = self.predict(shape)
        if not self.known or predicted <= 0.0:
            return False
        return not 1 / _OUTLIER_FACTOR <= seconds / predicted <= _OUTLIER_FACTOR

    def prompt_tokens_within(
        self, seconds: float, *, num_decodes: int, context: int, start: int, max_tokens: int
    ) -> int:
        """The most prompt tokens, up to `max_tokens`, that such a step can run beside its decode
        rows in `seconds`; `start` is the position of the first of them. 0 when none fits.

        Steps much larger than any that ran are not trusted: equal steps leave open what part of
        their time is constant. Of the numbers of rows that steps are rounded to it fills one: that
        which holds all tokens, or the largest that does not compute clearly fewer a second than a
        smaller one.
        """
        max_tokens = min(max_tokens, int(_GROWTH * self._largest))
        count = self._within(seconds, num_decodes, context, start, max_tokens)
        if num_decodes + count > self.largest_rounded:
            return count
        holds_all = bisect_left(self._step_rows, num_decodes + max_tokens)
        best, best_rate = 0, 0.0
        for rows in reversed(self._step_rows[: holds_all + 1]):
            count = min(rows - num_decodes, max_tokens)
            if count <= 0:
                break
            pairs = count * start + count * count // 2
            features = 1.0, rows / 1e3, context / 1e5, pairs / 1e6
            took = self._seconds(features, self._extra[rows])
            if took > seconds:
                continue
            if count == max_tokens:
                return count
            if _CLEARLY * count > best_rate * took:
                best, best_rate = count, count / took
        return best

    def _within(
        self, seconds: float, num_decodes: int, context: int, start: int, max_tokens: int
    ) -> int:
        """The same of steps whose rows are not rounded."""
        base = self.predict(StepWork(num_decodes=num_decodes, context=context))
        _, token, _, pair = (max(0.0, w) for w in self._weights)
        # A chunk of n tokens costs linear * n + square * n^2 seconds over the base.
        linear = token / 1e3 + pair * start / 1e6
        square = pair / 2e6
        left = seconds - base
        if left <= 0.0:
            return 0
        if linear <= 0.0 and square <= 0.0:
            return max_tokens
        # The positive root, in the form that does not cancel when `square` is small.
        root = 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left))
        return min(max_tokens, int(root))
