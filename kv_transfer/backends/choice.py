"""Which backends a rank has, and which of decode's backends a sender uses."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from kv_transfer.backends.base import Backend, BlockStore, PagedStore
from kv_transfer.backends.host import is_near
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.config import ONE_SIDED, BackendName, TransferConfig
from protocol.errors import HandoffFailed
from protocol.messages import LinkAddress

_KNOWN = frozenset(name.value for name in BackendName)


def build_backends(store: BlockStore, config: TransferConfig) -> list[Backend]:
    """The backends of `config.backend`, the most direct first."""
    wanted = config.backend
    if wanted is BackendName.AUTO:
        on_device = [BackendName.CUDA_IPC, BackendName.NCCL]
        names = on_device if store.device.type == "cuda" else [BackendName.TCP]
    else:
        names = [wanted]
    return [_build(name, store, config) for name in names]


def _build(name: BackendName, store: BlockStore, config: TransferConfig) -> Backend:
    needs = "CPU" if name is BackendName.TCP else "GPU"
    if (store.device.type == "cpu") != (needs == "CPU"):
        raise ValueError(f"transfer.backend {name} needs a {needs}, the pool is on {store.device}")
    if name is BackendName.TCP:
        return TcpBackend(config.host, config.ports)
    from kv_transfer.backends.cuda_ipc import CudaIpcBackend
    from kv_transfer.backends.nccl import BUFFERS, NcclBackend
    from kv_transfer.cuda.nccl import Staging

    paged = cast(PagedStore, store)
    if name is BackendName.CUDA_IPC:
        return CudaIpcBackend(paged, ctas=config.copy_ctas)
    return NcclBackend(
        paged,
        host=config.host,
        ports=config.ports,
        staging=Staging(
            config.staging_memory_bytes,
            largest=config.staging_bytes,
            count=BUFFERS,
            links=config.max_peers,
        ),
        ctas=config.nccl_ctas,
        copy_ctas=config.staging_ctas,
    )


def choose_backend(
    wanted: BackendName,
    links: Iterable[LinkAddress],
    *,
    num_ranks: int,
    refused: Container[str] = (),
) -> str:
    """The first backend that every rank of decode offers and that can reach it from here;
    `refused` backends were tried and could not. Raises HandoffFailed when there is none."""
    offers: dict[str, list[LinkAddress]] = {}
    for address in links:
        offers.setdefault(address.backend, []).append(address)
    for name, addresses in offers.items():
        if wanted not in (BackendName.AUTO, name) or name not in _KNOWN or name in refused:
            continue
        if sorted(address.rank for address in addresses) != list(range(num_ranks)):
            continue
        if name not in ONE_SIDED or all(is_near(address.endpoint) for address in addresses):
            return name
    raise HandoffFailed(
        f"decode's links are {sorted(offers)}, ours {wanted}: none of them reaches every rank",
        param="backend",
    )
