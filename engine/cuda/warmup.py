"""Steps that a CUDA engine runs before it serves: one for every kernel that steps can need.

Compiling a kernel takes about a second, in which every request waits. Triton compiles one for each
combination of constants, data types and alignments, so later steps must not bring new ones: vectors
are aligned (`engine.cuda.inputs`), and a test on a GPU checks that nothing is compiled.
"""

from __future__ import annotations

from engine.batch import SequenceStep, StepBatch
from engine.cpu.runner import warmup_batches
from engine.cuda.plan import DENSE_TOKENS, HISTORY_SEGMENTS, LEAST_TOKENS
from engine.kernels.sampling import mask_bytes
from protocol.sampling import SamplingParams

_PLAIN = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=2)
#: Tokens of a chunk in a step that has a graph, and in one that has none.
_GRAPH_CHUNK, _LARGE_CHUNK = 40, 800
#: Tokens of a history whose attention is cut into parts, and of a segment of one.
_CUT_HISTORY, _SEGMENT = 4096, HISTORY_SEGMENTS[-1]


def warmup_steps(
    *,
    block_size: int,
    max_model_len: int,
    max_chunk_tokens: int,
    vocab_size: int,
    graph_tokens: int,
    max_sequences: int,
    num_groups: int = 1,
) -> list[StepBatch]:
    """Chunks of every kind, sampled in every way, alone and beside a decode row; of several prompts
    where none is so long. All write to block 0, which no request holds yet."""
    allowed = b"\xff" * mask_bytes(vocab_size)
    batches = warmup_batches(block_size, max_model_len, num_groups)
    decode = batches[-1].sequences

    def add(count: int, start: int, sampling: SamplingParams, *, scored: bool = False) -> None:
        prompts = 1 if scored or start else -(-count // max(1, max_model_len - 1))
        fits = count <= max_chunk_tokens and prompts < max(2, max_sequences)
        count //= prompts
        if not fits or start + count >= max_model_len:
            return
        chunk = SequenceStep(
            tokens=(0,) * count,
            start=start,
            block_tables=((0,) * -(-(start + count) // block_size),) * num_groups,
            sampling=sampling,
            allowed=allowed if sampling is _PLAIN else None,
            targets=(0,) * count if scored else (),
        )
        batches.append(StepBatch(sequences=(chunk,) * prompts))
        batches.append(StepBatch(sequences=(*decode, *(chunk,) * prompts)))

    few = max(1, min(_GRAPH_CHUNK, max_model_len - 2))
    for sampling in (_PLAIN, _FILTERED):
        add(few, 0, sampling)
    for start in (0, _CUT_HISTORY) if few > 1 else ():
        add(few, start, _PLAIN, scored=True)
    add(LEAST_TOKENS, 0, _PLAIN, scored=True)  # no graph serves it
    add(max(_LARGE_CHUNK, graph_tokens + 32), 0, _PLAIN)
    add(_LARGE_CHUNK, _CUT_HISTORY, _PLAIN)
    for start in (0, _SEGMENT):
        add(max(DENSE_TOKENS, graph_tokens + 32), start, _PLAIN)
    for start in (_SEGMENT + 100, 2 * _SEGMENT):  # no graph serves them (FAR_HISTORY)
        add(DENSE_TOKENS, start, _PLAIN)
    return batches


def largest_prompts(
    *,
    max_tokens: int,
    max_sequences: int,
    max_model_len: int,
    block_size: int,
    num_groups: int = 1,
) -> list[SequenceStep]:
    """As many prompt tokens as one step can run, in as few prompts as hold them; all in block 0."""
    longest = max(1, max_model_len - 1)
    total = min(max_tokens, max_sequences * longest)
    counts = [min(longest, total - first) for first in range(0, total, longest)]
    return [
        SequenceStep(
            tokens=(0,) * count,
            start=0,
            block_tables=((0,) * -(-count // block_size),) * num_groups,
            sampling=_PLAIN,
        )
        for count in counts
    ]
