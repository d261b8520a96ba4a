"""Builds the ranks of an engine on GPUs from a model folder."""

from __future__ import annotations

import time

import torch

from engine.config import EngineConfig, Quantization
from engine.cuda.group import DeviceGroup
from engine.cuda.options import CudaOptions
from engine.cuda.runner import CudaRunner
from engine.errors import ModelRefused
from engine.kv.sizing import kv_fingerprint
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.families import load_model_config
from engine.ranks.follower import Follower
from engine.ranks.group import RankGroup, RankInvite
from engine.ranks.messages import open_store
from observability.logging import get_logger
from protocol.kv_layout import DTYPE_BYTES, KVFingerprint

log = get_logger(__name__)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The GPU that the configuration names, or the rank's own among the visible ones."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ModelRefused(f"device {config.device!r}: no CUDA device is usable", param="device")
    device = torch.device(config.device)
    index = rank % count if device.index is None else device.index
    if index >= count:
        raise ModelRefused(f"device {config.device!r}: there are {count} GPUs", param="device")
    return torch.device("cuda", index)


def options_for(config: EngineConfig) -> CudaOptions:
    """The defaults, or more where the configuration asks for larger steps."""
    default = CudaOptions()
    return CudaOptions(
        max_batch=max(default.max_batch, config.max_running),
        max_chunk_tokens=max(default.max_chunk_tokens, config.max_step_tokens),
    )


def load_rank(config: EngineConfig, rank: int) -> tuple[CudaRunner, KVFingerprint]:
    """A rank with its weights on its device, not yet opened."""
    device = rank_device(config, rank)
    torch.cuda.set_device(device)
    model = load_model_config(config.model_path)
    check_served(config, model)
    source = Checkpoint(config.model_path, getattr(torch, config.dtype), device)
    source.check(tied=model.tie_word_embeddings)
    check_fits(config, model, device)
    runner = CudaRunner(config, model, source, options_for(config), rank=rank, device=device)
    if rank == 0 and model.quantization is None:  # other ranks read no biases of sums
        source.check_unused(tied=model.tie_word_embeddings)
    return runner, kv_fingerprint(config, model, source, runner.max_model_len)


def check_served(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ModelRefused naming what CPUs serve and GPUs do not."""
    if config.quantization == Quantization.INT8:
        raise ModelRefused("quantization int8 is for CPUs; GPUs take fp8", param="quantization")
    if len(set(model.kv_shapes)) > 1 or model.normed_values or model.scaled_layers:
        raise ModelRefused(
            f"{model.architecture} is served on CPUs, not yet on GPUs: its layers differ in their "
            "KV heads",
            param="architectures",
        )


def check_fits(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raise ModelRefused with the figures when the weights alone exceed what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    bits = 8 * DTYPE_BYTES[config.dtype]
    if config.quantization is not None or model.quantization is not None:
        bits = 4  # at least
    needed = num_parameters(model) * bits // 8 // config.tp_size
    if needed > free:
        gib = 1 << 30
        raise ModelRefused(
            f"the weights take {needed / gib:.1f} GiB on each of {config.tp_size} GPU(s), and "
            f"{free / gib:.1f} GiB are free on {device}",
            param="tp_size",
        )


def num_parameters(model: ModelConfig) -> int:
    """Weights of the matrices; norms and biases are too few to count."""
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (attention + 3 * model.intermediate_size)
    tables = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer + tables * model.vocab_size * model.hidden_size


def build_rank_zero(
    config: EngineConfig, group: RankGroup | None, *, timeout_s: float
) -> tuple[CudaRunner, KVFingerprint]:
    """Load rank 0, wait for the followers of `group`, make pools and graphs on all ranks.

    Raises ModelRefused naming what cannot be served or does not fit, and RankLost when a follower
    does not come or fails within `timeout_s`.
    """
    began = time.monotonic()
    if group is not None:
        group.accept(timeout_s)
    runner, fingerprint = load_rank(config, 0)
    loaded = time.monotonic()
    num_blocks = runner.choose_num_blocks()
    if group is not None:  # the GPU of another rank may have less memory left
        num_blocks = group.num_blocks(num_blocks, timeout_s)
    runner.open(num_blocks)
    opened = time.monotonic()
    if group is None:
        runner.start()
    else:
        group.open(num_blocks)
        runner.start(_join(group.invite, 0, runner))
        runner.watch = group.check
    spent = {
        "weights_s": round(loaded - began, 2),
        "pool_s": round(opened - loaded, 2),
        "graphs_s": round(time.monotonic() - opened, 2),
    }
    log.info("engine built", extra={"device": str(runner.device), **spent})
    return runner, fingerprint


def load_follower(follower: Follower, config: EngineConfig) -> CudaRunner:
    """Load a follower's share, make its pool of rank 0's size, join the other ranks' GPUs."""
    runner, _ = load_rank(config, follower.rank)
    follower.open(runner)
    runner.start(_join(follower.invite, follower.rank, runner))
    return runner


def _join(invite: RankInvite, rank: int, runner: CudaRunner) -> DeviceGroup:
    return DeviceGroup(
        open_store(invite),
        rank,
        invite.size,
        runner.device,
        name=f"baton-{invite.host}-{invite.port}",
    )
