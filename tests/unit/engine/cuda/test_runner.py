"""The CUDA runner against the plain model, on a GPU or (tiny) in triton's interpreter."""

import pytest
import torch

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cuda.comm import SingleRank
from engine.cuda.options import CudaOptions, graph_batches
from engine.cuda.runner import CudaRunner
from engine.inputs import prepare_step
from engine.kernels.base import Geometry
from engine.kernels.cpu import CpuKernels
from engine.kv.pool import KVPool
from engine.model.config import ModelConfig
from engine.model.llama import LlamaModel
from engine.model.sharding import share_of
from engine.tp import TensorParallel
from protocol.errors import Internal
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1234)
NUM_BLOCKS = 24


def tiny_config(**changes):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 203,
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_dict(raw | changes)


class HostSource:
    """The same random weights for both models."""

    def __init__(self, device="cpu"):
        self._device = device

    def read(self, name, shape, *, rows=None, columns=None):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        data = torch.randn(shape, generator=generator)
        data = data * 0.1 + 1.0 if "norm" in name else data * shape[-1] ** -0.5
        if rows is not None:
            data = data[slice(*rows)]
        if columns is not None:
            data = data[:, slice(*columns)]
        return data.contiguous().to(self._device)


class Reference:
    """Runs batches on the CPU model."""

    def __init__(self, config):
        tp = TensorParallel()
        share = share_of(config, 0, 1)
        self.kernels = CpuKernels(
            Geometry(
                num_q_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=16,
                scale=config.head_dim**-0.5,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
        )
        self.config = config
        self.model = LlamaModel(config, share, HostSource(), self.kernels, tp, 160)

    def open(self, layout):
        self.pool = KVPool(layout, 0, torch.float32, torch.device("cpu"))

    def run(self, batch):
        step = prepare_step(
            batch,
            block_size=16,
            num_blocks=NUM_BLOCKS,
            vocab_size=self.config.vocab_size,
            max_model_len=160,
        )
        tokens = [None] * len(batch.sequences)
        with torch.inference_mode():
            logits = self.model.forward(step.inputs, self.pool.layers)
            if logits is not None:
                sampled = self.kernels.sample(logits, step.sampling).tolist()
                for index, token in zip(step.sampled, sampled, strict=True):
                    tokens[index] = token
        return tuple(tokens)


@pytest.fixture
def pair(device):
    return make_pair(device, tiny_config())


def make_pair(device, config):
    runner = CudaRunner(
        EngineConfig(model_path="unused", dtype="float32", device=str(device)),
        config,
        HostSource(device),
        SingleRank(),
        CudaOptions(max_batch=8, max_chunk_tokens=128),
    )
    runner.open(NUM_BLOCKS)
    reference = Reference(config)
    reference.open(runner.layout)
    return runner, reference


def seq(tokens, start, blocks, sampling=GREEDY, **more):
    return SequenceStep(
        tokens=tuple(tokens), start=start, block_ids=tuple(blocks), sampling=sampling, **more
    )


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_prompts_chunks_and_decodes_give_the_reference_tokens(device, changes):
    runner, reference = make_pair(device, tiny_config(**changes))
    ids = [(7 * i + 3) % 203 for i in range(120)]
    script = [
        [seq(ids[:33], 0, (5, 2, 9), sampling=None), seq(ids[50:55], 0, (1,), SEEDED)],
        [seq(ids[33:50], 33, (5, 2, 9, 11)), seq([9], 5, (1,), SEEDED, banned=(0, 4))],
        [seq([17], 50, (5, 2, 9, 11), SEEDED), seq([30], 6, (1,)), seq(ids[:70], 0, range(12, 17))],
        [seq([18], 51, (5, 2, 9, 11))],
        [seq([19], 52, (5, 2, 9, 11)), seq([31], 7, (1,)), seq([1], 70, range(12, 17), SEEDED)],
    ]
    for sequences in script:
        batch = StepBatch(sequences=tuple(sequences))
        assert runner.run(batch).tokens == reference.run(batch)
    got, want = runner.pool.data.cpu(), reference.pool.data
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_step_can_be_launched_before_the_tokens_of_the_last_are_known(pair):
    runner, reference = pair
    tables = [(3, 4), (8,)]
    first = StepBatch(sequences=(seq(range(15), 0, tables[0]), seq(range(9), 0, tables[1], SEEDED)))
    pending = [runner.launch(first)]
    rows, at = [0, 1], [15, 9]
    for step in range(3):
        order = [1, 0] if step % 2 == 0 else [0, 1]
        batch = StepBatch(
            sequences=tuple(
                seq([0], at[i], tables[i], SEEDED if i else GREEDY, previous=rows[i])
                for i in order
            )
        )
        pending.append(runner.launch(batch))
        rows = [order.index(0), order.index(1)]
        at = [n + 1 for n in at]
    results = [p.wait().tokens for p in pending]
    tokens = list(reference.run(first))
    assert list(results[0]) == tokens
    at = [15, 9]
    for step in range(3):
        order = [1, 0] if step % 2 == 0 else [0, 1]
        batch = StepBatch(
            sequences=tuple(
                seq([tokens[i]], at[i], tables[i], SEEDED if i else GREEDY) for i in order
            )
        )
        out = reference.run(batch)
        assert results[step + 1] == out
        tokens = [out[order.index(0)], out[order.index(1)]]
        at = [n + 1 for n in at]


def test_steps_outside_the_limits_are_refused_before_anything_runs(pair):
    runner, _ = pair
    for bad in (
        seq([203], 0, (1,)),
        seq([1], 16, (1,)),
        seq([1], 0, (NUM_BLOCKS,)),
        seq([1], 159 + 1, range(11)),
        seq([0], 3, (1,), previous=4),
        seq(range(129), 0, range(9)),
    ):
        with pytest.raises(Internal):
            runner.launch(StepBatch(sequences=(bad,)))


def test_graph_batches_hold_every_batch():
    assert graph_batches(1) == (1,)
    assert graph_batches(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_batches(256)[-1] == 256
