"""Settings of the CUDA engine that a CPU engine does not have."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.triton.splits import cuts_by_length
from protocol.errors import InvalidRequest

#: Rows that the engine's own products (engine.cuda.products.split_decode) serve at most.
MAX_SPLIT_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How much one CUDA engine runs at once, and how.

    max_batch: sequences of one step, and the largest batch with a CUDA graph.
    max_chunk_tokens: prompt tokens of one step.
    prompt_graphs: steps of up to 1,328 rows, prompt tokens among them, have CUDA graphs, too.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a CUDA graph of a step depends on: rows of the forward pass and rows of logits, padding
    included; with prompt chunks, programs of decode attention, and of that of chunks where no heads
    share tiles; without, whether a context of a small batch is long."""

    rows: int
    samples: int
    chunk_programs: int = 0
    decode_programs: int = 0
    long_context: bool = False

    def holds(self, rows: int, samples: int, chunk_programs: int, decode_programs: int) -> bool:
        """Whether a step of that size fits."""
        return (
            rows <= self.rows
            and samples <= self.samples
            and chunk_programs <= self.chunk_programs
            and decode_programs <= self.decode_programs
        )


def graph_batches(max_batch: int) -> tuple[int, ...]:
    """Batch sizes with a graph of their own, ascending; a batch runs in the next larger one."""
    sizes = [n for n in (1, 2, 4, 8) if n < max_batch]
    sizes += range(16, max_batch, 16)
    return (*sizes, max_batch)


#: Rows of steps with prompt chunks: those that cuBLAS computes no slower than fewer rows, on an
#: H200 with the sizes of an 8B model (docs/adr/0036, 0085). Larger steps outlast their launches.
_MIXED_ROWS = (64, 80, 96, 128, 144, 192, 256, 272, 320, 432, 512, 528, 592, 640, 688, 720, 768)
_LARGE_ROWS = (816, 848, 896, 960, 1024, 1072, 1136, 1200, 1248, 1328)
#: Programs of decode and of chunk attention, and rows of logits, of such a step: of prompts alone,
#: with dozens of decode rows, with hundreds or many prompts.
_MIXED_LEVELS = ((0, 384, 16), (1280, 384, 96), (4096, 2048, 512))
_LARGE_LEVELS = ((0, 640, 32), (1280, 1152, 96))


def is_large(rows: int) -> bool:
    """Whether prompt chunks are most of any such step: its query tiles are those of steps without
    graphs, and it is several graphs, which tell that layers have ended."""
    return rows > _MIXED_ROWS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """Shapes that steps are rounded up to, each kind ascending: of decode rows alone, and with
    prompt chunks."""

    decode: tuple[StepShape, ...]
    mixed: tuple[StepShape, ...]

    @staticmethod
    def of(options: CudaOptions, kv_heads: int) -> StepShapes:
        """The shapes of one engine's steps. kv_heads: of the rank that has the fewest: all ranks
        capture the same graphs, which wait for each other."""
        decode = tuple(
            StepShape(rows=rows, samples=rows, long_context=long)
            for rows in graph_batches(options.max_batch)
            for long in ((False,) if cuts_by_length(rows, kv_heads) else (False, True))
        )
        max_rows = min(options.max_chunk_tokens + options.max_batch, _LARGE_ROWS[-1])
        sizes = (*(rows for rows in (*_MIXED_ROWS, *_LARGE_ROWS) if rows < max_rows), max_rows)
        mixed = tuple(
            StepShape(
                rows=rows,
                samples=min(samples, rows, options.max_batch),
                chunk_programs=chunks,
                decode_programs=decodes,
            )
            for rows in sizes
            for decodes, chunks, samples in (_LARGE_LEVELS if is_large(rows) else _MIXED_LEVELS)
        )
        return StepShapes(decode=decode, mixed=mixed if options.prompt_graphs else ())

    @property
    def all(self) -> tuple[StepShape, ...]:
        """Of either kind."""
        return (*self.decode, *self.mixed)

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """Rows of the steps with prompt chunks that graphs serve, ascending."""
        return tuple(sorted({step.rows for step in self.mixed}))

    def for_decodes(self, count: int, *, long_context: bool) -> StepShape:
        """The smallest shape of decode rows alone that holds so many."""
        holding = [shape for shape in self.decode if shape.rows >= count]
        same = (shape for shape in holding if shape.rows == holding[0].rows)
        return next((s for s in same if s.long_context == long_context), holding[0])
