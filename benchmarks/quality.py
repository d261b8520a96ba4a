"""What quantising at load costs in quality: perplexity, and divergence from the unquantised model.

    python -m benchmarks.quality --model FOLDER --documents FILE.jsonl [--formats none,fp8,int4]

Each document's first half is computed by the engine of one format, as a prefill worker does, and
the second half, on that KV, by the engine of another, as a decode worker does. Perplexity is of the
second half; KL is the divergence of the pair's distribution from the unquantised model's, in nats a
token.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cpu.runner import RankRunner
from engine.ranks.tensor_parallel import TensorParallel

_BLOCK = 16


class Half:
    """An engine that computes halves of documents."""

    def __init__(self, model: str, quantization: str | None, length: int, dtype: str) -> None:
        blocks = -(-2 * length // _BLOCK)
        config = EngineConfig(
            model_path=model,
            quantization=quantization,
            dtype=dtype,
            num_threads=1,
            block_size=_BLOCK,
            num_blocks=blocks,
        )
        self._runner = RankRunner(config, TensorParallel())
        self._runner.open(blocks)
        self._table = (tuple(range(blocks)),)

    def context(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The KV of a first half."""
        self._run(ids, 0, ())
        return [layer.clone() for layer in self._runner.pool.layers]

    def logprobs(self, kv: Sequence[torch.Tensor], ids: Sequence[int], start: int) -> torch.Tensor:
        """Log-probabilities of what follows each of `ids`, on the KV of the tokens before."""
        for mine, layer in zip(self._runner.pool.layers, kv, strict=True):
            mine.copy_(layer)
        hidden = self._run(ids, start, ids)
        assert hidden is not None
        with torch.inference_mode():
            logits = self._runner.model.logits(hidden)
            assert logits is not None
            return logits.float().log_softmax(-1)

    def _run(self, ids: Sequence[int], start: int, targets: Sequence[int]) -> torch.Tensor | None:
        step = SequenceStep(
            tokens=tuple(ids),
            start=start,
            block_tables=self._table,
            targets=tuple(targets),
            sampling=None,
        )
        prepared = self._runner.prepare(StepBatch(sequences=(step,)))
        with torch.inference_mode():
            return self._runner.model.forward(prepared.groups, self._runner.pool.layers).hidden


def main() -> None:
    """Print a table with a row for each pair of formats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--formats", default="none,fp8,int8,int4")
    parser.add_argument("--tokens", type=int, default=512, help="of each half of a document")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    length = options.tokens
    names = options.formats.split(",")
    engines = {
        name: Half(options.model, None if name == "none" else name, length, options.dtype)
        for name in dict.fromkeys(["none", *names])
    }
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    losses: defaultdict[tuple[str, str], float] = defaultdict(float)
    divergences: defaultdict[tuple[str, str], float] = defaultdict(float)
    count = 0
    for line in Path(options.documents).read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(json.loads(line)["text"]).ids[: 2 * length + 1]
        if len(ids) <= 2 * length:
            continue
        count += length
        first, second = ids[:length], ids[length:-1]
        following = torch.tensor(ids[length + 1 :])[:, None]
        contexts = {name: engine.context(first) for name, engine in engines.items()}
        base = engines["none"].logprobs(contexts["none"], second, length)
        for pair in product(names, names):
            got = engines[pair[1]].logprobs(contexts[pair[0]], second, length)
            losses[pair] -= float(got.gather(1, following).sum())
            divergences[pair] += float((base.exp() * (base - got)).sum())
    print(f"{count} tokens")
    print("| prefill | decode | perplexity | KL |\n| --- | --- | --- | --- |")
    for pair in product(names, names):
        perplexity = math.exp(losses[pair] / count)
        print(f"| {pair[0]} | {pair[1]} | {perplexity:.3f} | {divergences[pair] / count:.5f} |")


if __name__ == "__main__":
    main()
