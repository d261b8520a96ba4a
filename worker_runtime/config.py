"""Settings of both kinds of worker."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Bounds and deadlines of one worker.

    max_num_seqs, max_num_batched_tokens: sequences and tokens of one step; the latter is the chunk
    size of a long prompt.
    fill_tokens: prompts join a prefill step until it has so many tokens, and none is cut that fits
    max_num_batched_tokens; 0: a step has up to max_num_batched_tokens, and the last prompt is cut.
    target_step_s: decode cuts prompt chunks so that a step with one takes about this long, which
    bounds the gaps of the streams in it; 0: max_num_batched_tokens alone bounds it. With a target
    on a GPU none has more tokens than the largest graph for prompts (1,328).
    max_step_s: what such a step may grow to where prompts that wait have their first tokens in time
        only so; 0: it does not grow. A step of prompts alone, for whose end no stream waits, may
        take twice as long.
    hold_first_s: a first token that prefill has within so many seconds of its prompt is left to
        decode to send, when it plans the step for the second: no gap waits for the hand-off. 0:
        prefill sends each at once.
    max_waiting: accepted requests that may wait; beyond it a submit is refused as overloaded.
    watermark: share of blocks kept free, on admission, for the growth of running sequences.
    enable_prefix_caching: keep KV, and share it between requests with the same prefix.
    starvation_s: a request that waited this long goes before all younger ones.
    heartbeat_s: longest silence on an event stream.
    patience_s: a router that takes no event for this long counts as gone.
    stall_s: steps that make no progress for longer, beyond four times the longest step so far,
        or four times what its tokens should take on a CPU, mark the engine as dead.
    grammar_threads: threads that compute masks of structured outputs.
    """

    host: str = "127.0.0.1"
    ports: str = ""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    fill_tokens: int = 0
    target_step_s: float = 0.0
    max_step_s: float = 0.0
    hold_first_s: float = 0.0
    max_waiting: int = 1024
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    starvation_s: float = 5.0
    heartbeat_s: float = 0.5
    patience_s: float = 20.0
    stall_s: float = 10.0
    grammar_threads: int = 4

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.fill_tokens <= self.max_num_batched_tokens:
            raise ValueError(
                f"fill_tokens must be in 0 .. max_num_batched_tokens, got {self.fill_tokens}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        for name in ("target_step_s", "max_step_s", "hold_first_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("starvation_s", "heartbeat_s", "patience_s", "stall_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def held_in_graphs(self, graph_tokens: int) -> WorkerConfig:
        """The same, for an engine that starts steps of so many tokens by one launch (0: of any
        number). Where steps have a target, none is larger: its launches alone would take longer."""
        if not (self.target_step_s and graph_tokens):
            return self
        most = max(self.max_num_seqs, min(self.max_num_batched_tokens, graph_tokens))
        fill_tokens = min(self.fill_tokens, most)
        return replace(self, max_num_batched_tokens=most, fill_tokens=fill_tokens)


_COUNTS = ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "grammar_threads")
