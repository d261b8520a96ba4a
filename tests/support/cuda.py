"""A tiny model on the CUDA runner and, with the same weights, on the plain CPU model."""

from typing import Any

import torch
from msgspec.structs import replace

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cpu.inputs import StepLimits, prepare_step
from engine.cpu.runner import run_prepared
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner
from engine.kernels.base import Geometry
from engine.kernels.cpu.operations import CpuKernels
from engine.kernels.sampling import mask_bytes
from engine.kv.pool import KVPool
from engine.kv.sizing import kv_layout
from engine.model.decoder import Decoder
from engine.model.families import parse_model_config
from engine.model.kv_groups import group_layers
from engine.model.sharding import share_of
from engine.model.weights import WeightLoader
from engine.ranks.tensor_parallel import TensorParallel
from protocol.sampling import SamplingParams
from tests.support.engine import int32

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1234)
PENALISED = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    seed=7,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.6,
    logit_bias=((5, 2.5), (90, -100.0)),
)
BIASED = SamplingParams(temperature=0.0, logit_bias=((44, 40.0),), logprobs=3)
LOGGED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1234, logprobs=0)
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
    return parse_model_config(raw | changes)


class HostSource:
    """The same random weights for both models."""

    def __init__(self, device="cpu", dtype=torch.float32):
        self._device = device
        self._dtype = dtype

    def read(self, name, shape, *, rows=None, columns=None):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        data = torch.randn(shape, generator=generator)
        data = data * 0.1 + 1.0 if "norm" in name else data * shape[-1] ** -0.5
        if rows is not None:
            data = data[slice(*rows)]
        if columns is not None:
            data = data[:, slice(*columns)]
        return data.contiguous().to(self._device, self._dtype)


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
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                dtype=torch.float32,
            )
        )
        self.config = config
        loader = WeightLoader(config, share, HostSource(), torch.device("cpu"))
        self.model = Decoder(loader, self.kernels, tp, 160)

    def open(self, layout=None):
        """Make the pool; returns its layout, that of `make_runner` where none is given."""
        if layout is None:
            count = NUM_BLOCKS * len(group_layers(self.config, 160).groups)
            layout = kv_layout(
                EngineConfig(model_path="unused", dtype="float32"), self.config, count
            )
        self.limits = StepLimits(
            block_size=16,
            num_blocks=layout.num_blocks,
            vocab_size=self.config.vocab_size,
            max_model_len=160,
            groups=layout.groups,
        )
        self.pool = KVPool(layout, 0, torch.float32, torch.device("cpu"))
        return layout

    def run(self, batch):
        step = prepare_step(batch, self.limits)
        with torch.inference_mode():
            return run_prepared(self.model, self.pool.layers, step)


def make_runner(
    device, config, rank=0, tp_size=1, dtype="float32", quantization=None, kv_dtype=None, **options
):
    runner = CudaRunner(
        EngineConfig(
            model_path="unused",
            dtype=dtype,
            device=str(device),
            tp_size=tp_size,
            quantization=quantization,
            kv_dtype=kv_dtype,
        ),
        config,
        HostSource(device, getattr(torch, dtype)),
        CudaOptions(**{"max_batch": 8, "max_chunk_tokens": 128} | options),
        rank=rank,
    )
    runner.open(NUM_BLOCKS * len(group_layers(config, runner.max_model_len).groups))
    return runner


def make_pair(device, config, **options):
    runner = make_runner(device, config, **options)
    runner.start()
    reference = Reference(config)
    reference.open(runner.layout)
    return runner, reference


def seq(tokens, start, blocks, sampling=GREEDY, **more):
    return SequenceStep(
        tokens=tuple(tokens), start=start, block_tables=(tuple(blocks),), sampling=sampling, **more
    )


def for_groups(batch, layout):
    """The same with tables of every KV group, each of blocks of its own."""
    return StepBatch(
        sequences=tuple(
            replace(
                step,
                block_tables=tuple(
                    tuple(
                        NUM_BLOCKS * index + block
                        for block in step.block_tables[0][group.first_token(step.start) // 16 :]
                    )
                    for index, group in enumerate(layout.groups)
                ),
            )
            for step in batch.sequences
        )
    )


def mask(*allowed, vocab_size=203):
    """Only these ids."""
    bits = sum(1 << token for token in allowed)
    return bits.to_bytes(mask_bytes(vocab_size), "little")


def mixed_script():
    """Batches of chunks with and without history, decodes, padding, seeds, bans, masks, penalties
    and log-probabilities."""
    few = {"allowed": mask(4, 9, 150, 202)}
    ids = [(7 * i + 3) % 203 for i in range(120)]
    script = [
        [seq(ids[:33], 0, (5, 2, 9), sampling=None), seq(ids[50:55], 0, (1,), SEEDED)],
        [seq(ids[33:50], 33, (5, 2, 9, 11)), seq([9], 5, (1,), SEEDED, banned=(0, 4))],
        [seq([17], 50, (5, 2, 9, 11), SEEDED), seq([30], 6, (1,)), seq(ids[:70], 0, range(12, 17))],
        [
            seq([18], 51, (5, 2, 9, 11), PENALISED, seen=int32(3, 18, 200), counts=int32(0, 1, 4)),
            seq([31], 7, (1,), BIASED),
            seq([1], 70, range(12, 17)),
        ],
        [seq([18], 51, (5, 2, 9, 11), **few)],
        [seq([19], 52, (5, 2, 9, 11)), seq([31], 7, (1,)), seq([1], 70, range(12, 17), SEEDED)],
        [seq(ids[:9], 0, (6,), SEEDED, **few), seq([32], 8, (1,)), seq([20], 53, (5, 2, 9, 11))],
        [seq(ids[:20], 0, (18, 19), sampling=None, targets=tuple(ids[1:21]), num_top=2)],
        [
            seq(ids[20:21], 20, (18, 19), sampling=None, targets=tuple(ids[21:22]), num_top=2),
            seq([2], 71, range(12, 17), LOGGED, **few),
            seq(ids[:90], 0, range(18, 24), LOGGED, targets=tuple(ids[1:90])),
        ],
    ]
    return [StepBatch(sequences=tuple(sequences)) for sequences in script]


TIED = {"attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3}


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 8.0,
}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 21}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 1,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 4,
    "sliding_window": 19,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 18,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    },
}
#: Changes of `tiny_config` that make each family, and how many batches of `mixed_script` show it in
#: triton's interpreter (all: None).
FAMILIES: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": ({}, None),
    "llama-biased": (TIED, 3),
    "qwen3": (QWEN3, 3),
    "granite": (GRANITE, 3),
    "smollm3": (SMOLLM3, 3),
    "olmo2": (OLMO2, 3),
    "mistral-window": (MISTRAL, 4),
    "qwen2-window": (QWEN2, 3),
    "phi4-mini": (PHI4_MINI, 3),
    "gemma2": (GEMMA2, 3),
    "gemma3": (GEMMA3, 3),
}
