"""How far the engine's stream is with a layer's KV: lets others queue work behind a step that still
runs."""

from __future__ import annotations

import torch

from protocol.errors import Internal

_DEPTH = 8  # steps remembered, more than are ever on their way


class StepMarks:
    """An event behind each layer's writes of each of the last steps that wrote prompt KV.

    `begin` and `mark` belong to the thread that launches steps, the others are safe from any. Steps
    are numbered from 1 in the order of launch, alike on all ranks.
    """

    def __init__(self, num_layers: int) -> None:
        self._rows = [
            [torch.cuda.Event(blocking=True) for _ in range(num_layers)] for _ in range(_DEPTH)
        ]
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the newest step; 0 before the first."""
        return self._last

    def begin(self) -> None:
        """A step is about to be put on the current stream."""
        self._last += 1

    def mark(self, layer: int) -> None:
        """The newest step's KV of this layer has just been put on the current stream."""
        self._rows[self._last % _DEPTH][layer].record()

    def follow(self, step: int, layer: int) -> None:
        """Have the current stream wait for the KV that `step` writes, up to and with `layer`."""
        event = self._event(step, layer)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self, step: int, layer: int) -> None:
        """Block until the KV that `step` writes is there, up to and with `layer`."""
        event = self._event(step, layer)
        if event is not None:
            event.synchronize()

    def is_over(self, step: int) -> bool:
        """Whether all KV of `step` is written."""
        event = self._event(step, -1)
        return event is None or event.query()

    def _event(self, step: int, layer: int) -> torch.cuda.Event | None:
        """None for a step that was over long ago. Raises Internal when it was not launched."""
        if step > self._last:
            raise Internal(f"step {step} was not launched, the newest is {self._last}")
        return None if step <= self._last - _DEPTH else self._rows[step % _DEPTH][layer]
