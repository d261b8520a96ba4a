"""What a CUDA engine runs before it serves: a step for every kernel that any step can need.

Compiling one takes about a second, in which every request waits. A kernel is compiled anew for each
combination of constants, data types and alignments it is called with, so that other steps must not
bring new ones: buffers are laid out for that (`layout.ALIGNMENT`), and a test on a GPU holds it.
"""

from __future__ import annotations

from engine.batch import SequenceStep, StepBatch
from engine.cpu.runner import warmup_batches
from engine.kernels.masks import mask_bytes
from protocol.sampling import SamplingParams

#: One chunk for each size of query tile in prompt attention.
_CHUNKS = (8, 40, 100)
_PLAIN = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=2)


def warmup_steps(*, block_size: int, max_model_len: int, vocab_size: int) -> list[StepBatch]:
    """Chunks of every kind, sampled in every way, beside a decode. All write to block 0, which no
    request holds yet."""
    allowed = b"\xff" * mask_bytes(vocab_size)
    batches = warmup_batches(block_size, max_model_len)
    decode = batches[-1].sequences
    for count in _CHUNKS:
        tokens = (0,) * max(1, min(count, max_model_len - 1))
        blocks = (0,) * -(-len(tokens) // block_size)
        for sampling, mask in ((_PLAIN, allowed), (_FILTERED, None)):
            chunk = SequenceStep(
                tokens=tokens, start=0, block_ids=blocks, sampling=sampling, allowed=mask
            )
            batches.append(StepBatch(sequences=(chunk,)))
            batches.append(StepBatch(sequences=(*decode, chunk)))
    return batches


def largest_prompts(
    *, max_tokens: int, max_sequences: int, max_model_len: int, block_size: int
) -> list[SequenceStep]:
    """As many prompt tokens as one step can run, in as few prompts as hold them; all in block 0."""
    longest = max(1, max_model_len - 1)
    total = min(max_tokens, max_sequences * longest)
    counts = [min(longest, total - first) for first in range(0, total, longest)]
    return [
        SequenceStep(
            tokens=(0,) * count,
            start=0,
            block_ids=(0,) * -(-count // block_size),
            sampling=_PLAIN,
        )
        for count in counts
    ]
