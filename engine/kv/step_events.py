"""CUDA events that tell how far a running step has written KV, to queue transfers behind it."""

from __future__ import annotations

import torch

from protocol.errors import Internal

_DEPTH = 8  # steps remembered, more than are ever in flight


class StepEvents:
    """Events behind the KV of the last steps: per layer where a step records them, else per step.

    `begin`, `mark` and `end` belong to the thread that launches steps; the others are safe from any
    thread, for steps whose launch is over. Steps are numbered from 1 in launch order, alike on all
    ranks.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers = [
            [torch.cuda.Event(blocking=True) for _ in range(num_layers)] for _ in range(_DEPTH)
        ]
        self._ends = [torch.cuda.Event(blocking=True) for _ in range(_DEPTH)]
        self._marked = [0] * _DEPTH
        self._last = 0

    def begin(self) -> None:
        """A step is about to be queued on the current stream."""
        self._last += 1
        self._marked[self._last % _DEPTH] = 0

    def mark(self, layer: int) -> None:
        """The kernels that write KV up to this layer were queued on the current stream."""
        row = self._last % _DEPTH
        self._layers[row][layer].record()
        self._marked[row] = layer + 1

    def end(self) -> int:
        """The whole step was queued on the current stream; returns its number."""
        self._ends[self._last % _DEPTH].record()
        return self._last

    def follow(self, stream: torch.cuda.Stream, step: int, layer: int) -> None:
        """Make a stream wait until `step` has written the KV of layers 0 .. layer."""
        event = self._event(step, layer)
        if event is not None:
            stream.wait_event(event)

    def wait(self, step: int, layer: int) -> None:
        """Block until `step` has written the KV of layers 0 .. layer."""
        event = self._event(step, layer)
        if event is not None:
            event.synchronize()

    def is_over(self, step: int) -> bool:
        """Whether all KV of `step` is written."""
        event = self._event(step, len(self._layers[0]) - 1)
        return event is None or event.query()

    def _event(self, step: int, layer: int) -> torch.cuda.Event | None:
        """None for a step long over. Raises Internal when it was not launched."""
        if step > self._last:
            raise Internal(f"step {step} was not launched, the newest is {self._last}")
        if step <= self._last - _DEPTH:
            return None
        row = step % _DEPTH
        return self._layers[row][layer] if layer < self._marked[row] else self._ends[row]
