"""What the engine uses of torch that has no public name: nowhere else.

Another version may rename or change it, so `pyproject.toml` bounds torch from above; to raise the
bound, check this file.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor


def scaled_mm(*args: Any, **options: Any) -> Tensor:
    """Product of codes with scales; torch.nn.functional.scaled_mm takes no `out`."""
    product: Tensor = torch._scaled_mm(*args, **options)
    return product


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention by cuDNN, and the logarithm of its sums."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse


def mkldnn_operators() -> tuple[Any, Any, Any]:
    """Whether bfloat16 is supported, packing of weights, the packed product; each None without."""
    names = "_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"
    supported, pack, product = (getattr(torch.ops.mkldnn, name, None) for name in names)
    return supported, pack, product


def gloo_group(store: Any, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
    """Its own group on its own device: the default one resolves this host's name. `host` is this
    rank's address. Raises RuntimeError."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
    """Raises RuntimeError."""
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, size, options)


def gather(group: Any, out: Tensor, x: Tensor) -> None:
    """`[size, *x.shape]` into `out`, on every rank; `x` is contiguous."""
    group._allgather_base(out, x).wait()


def register(name: str, store: Any, rank: int, size: int, device: torch.device, nccl: Any) -> Any:
    """A group by whose name symmetric memory finds its peers. The registry holds it weakly."""
    group: Any = c10d.ProcessGroup(store, rank, size)
    group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(name)
    registry: Any = c10d
    registry._register_process_group(name, group)
    return group


def unregister(name: str) -> None:
    registry: Any = c10d
    registry._unregister_process_group(name)


def symmetric_memory() -> Any:
    """The class that makes it."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory
