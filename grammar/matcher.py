"""One output's state in its grammar, and the tokens that may follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a worker of a model without a tokenizer runs without the library
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

#: Replaces the library's "NoExtensionBias".
_NOTHING_FITS = "no text has this form, or goes on from here, as when a rule only refers to itself"


class Matcher:
    """Depends on the grammar and the output tokens alone: the same tokens give the same masks on
    any worker.

    `ends` are the tokens that end an output; they are allowed where the grammar may end. `mask` has
    a bit for each id (engine.kernels.sampling); None until `compute_masks` has run after the last
    token. `error` is set when there can be no mask.
    """

    def __init__(
        self,
        state: LLMatcher,
        executor: LLExecutor,
        vocabulary: LLTokenizer,
        *,
        ends: Sequence[int],
    ) -> None:
        self.state = state
        self.executor = executor
        self.mask: bytes | None = None
        self.error = ""
        self.vocab_size = vocabulary.vocab_size
        self._own_end = vocabulary.eos_token
        self._ends = tuple(ends)

    def take(self, tokens: Sequence[int]) -> None:
        self.mask = None
        if not self.state.consume_tokens(list(tokens)) and not self.error:
            reason = self.state.get_error().split("\n", 1)[0]
            self.error = f"the output left its grammar: {reason}"

    def leaves_any(self, banned: Sequence[int]) -> bool:
        """Whether the mask allows a token that is not banned."""
        bits = int.from_bytes(self.mask or b"", "little")
        for token in banned:
            bits &= ~(1 << token)
        return bits != 0

    def finish_mask(self, row: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Store a computed mask, with the model's end tokens instead of the library's own."""
        if self.state.is_error():
            error = self.state.get_error().split("\n", 1)[0]
            self.error = _NOTHING_FITS if error == "NoExtensionBias" else error
            return
        for token in (self._own_end, *self._ends):
            row[token >> 3] &= 0xFF ^ (1 << (token & 7))
        if self.state.is_accepting():
            for token in self._ends:
                row[token >> 3] |= 1 << (token & 7)
        if not row.any():
            self.error = "no token of the vocabulary continues the output"
            return
        self.mask = row.tobytes()


def compute_masks(matchers: Iterable[Matcher]) -> None:
    """Compute the missing masks of matchers of one compiler: on its threads, without the GIL, tens
    of microseconds each."""
    open_ones = [m for m in matchers if m.mask is None and not m.error]
    if not open_ones:
        return
    words = -(-open_ones[0].vocab_size // 32)
    masks = np.zeros((len(open_ones), words), dtype=np.int32)
    if len(open_ones) == 1:  # done before another thread would wake
        open_ones[0].state.unsafe_compute_mask_ptr(masks.ctypes.data, 4 * words)
    else:
        rows = [(matcher.state, row) for row, matcher in enumerate(open_ones)]
        open_ones[0].executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, len(rows))
    for matcher, row in zip(open_ones, masks.view(np.uint8), strict=True):
        matcher.finish_mask(row)
