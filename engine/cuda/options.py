"""Settings of the CUDA engine that a CPU engine does not have."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidRequest

#: Rows that the engine's own products (engine.cuda.split_decode) serve at most.
MAX_SPLIT_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How much one CUDA engine runs at once, and how.

    max_batch: sequences of one step, and the largest batch with a CUDA graph.
    max_chunk_tokens: prompt tokens of one step.
    prompt_graphs: steps of some hundreds of prompt tokens on one GPU under CUDA graphs, too.
    split_rows: on one GPU, decode steps of 2 to so many rows run on the engine's own products
        instead of cuBLAS's, where their sizes allow it.
    """

    max_batch: int = 256
    max_chunk_tokens: int = 8192
    prompt_graphs: bool = True
    split_rows: int = 64

    def __post_init__(self) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        for name in ("max_batch", "max_chunk_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", param=name)
        if not 0 <= self.split_rows <= MAX_SPLIT_ROWS:
            raise InvalidRequest(f"split_rows must be in 0 .. {MAX_SPLIT_ROWS}", param="split_rows")


def graph_batches(max_batch: int) -> tuple[int, ...]:
    """Batch sizes with a graph of their own, ascending; a batch runs in the next larger one."""
    sizes = [n for n in (1, 2, 4, 8) if n < max_batch]
    sizes += range(16, max_batch, 16)
    return (*sizes, max_batch)


def next_size(sizes: tuple[int, ...], count: int) -> int | None:
    """The smallest of ascending sizes that holds `count`."""
    return next((size for size in sizes if size >= count), None)
