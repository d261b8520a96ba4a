"""Settings of the hand-off."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from observability.logging import get_logger

log = get_logger(__name__)


class BackendName(StrEnum):
    """How KV bytes travel."""

    AUTO = "auto"  # decode offers what its device can do; prefill takes the first that reaches it
    TCP = "tcp"  # between CPUs
    NCCL = "nccl"  # between GPUs of any hosts
    CUDA_IPC = "cuda_ipc"  # between GPUs of one host: prefill writes into decode's pool

    @classmethod
    def _missing_(cls, value: object) -> BackendName | None:
        if value != "gloo":
            return None
        log.warning("the transfer backend gloo is called tcp now")
        return cls.TCP


#: Backends whose sender writes into the receiver's pool; the receiver posts nothing.
ONE_SIDED = frozenset({BackendName.CUDA_IPC.value})
#: Backends that move slices of a GPU pool, staging included.
ON_DEVICE = frozenset({BackendName.CUDA_IPC.value, BackendName.NCCL.value})


class ChecksumKind(StrEnum):
    """How the bytes of a piece are summed for the check at commit."""

    AUTO = "auto"  # crc32 through host memory; none between GPUs, whose links check themselves
    CRC32 = "crc32"  # sees a change of order
    SUM = "sum"  # 64-bit sum of 32-bit words, several times cheaper, does not see a change of order
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Settings of one worker's hand-offs. Times in seconds; prefill and decode should agree.

    backend: how KV travels. `auto`: between CPUs tcp, between GPUs cuda_ipc where one host has
    both, else nccl.
    checksum: how a commit proves that the bytes arrived. `auto`: crc32 through host memory, none
    between GPUs.
    lease_s: from the first piece to the commit, whatever the ticket still allows. While a granted
    prompt waits in prefill's queue, decode asks prefill at this interval whether it still has it.
    op_timeout_s: one message on one link, once both ends may post it.
    connect_timeout_s: building one link.
    rpc_timeout_s, rpc_attempts: one control call, and the tries of one that is not answered.
    repair_s: after a receive failed, the interval at which decode asks prefill whether it still
    works on the hand-off.
    piece_attempts: tries of a piece, each on a new link, before the hand-off fails.
    pipeline_depth: announced pieces in flight to one decode worker.
    max_piece_bytes: upper size of a piece over all ranks; larger pushes are split.
    device_piece_bytes: the same between GPUs, where a larger piece saves control calls.
    staging_bytes: one message of an nccl link, which holds two of them.
    staging_memory_bytes: for all nccl links of a rank, left free when its KV pool is sized. Half of
    it is kept in equal shares for `max_peers` links, the first ones take more.
    nccl_ctas: thread blocks of an nccl link. Each takes a multiprocessor from decode's steps: over
    NVLink 4 carry 125 GB/s of hand-offs, more than a network card, and 32 carry 285.
    staging_ctas: thread blocks of the copy of a message out of blocks or into them.
    copy_ctas: thread blocks of a cuda_ipc write.
    max_peers: channels kept open; the least recently used idle one is closed.
    finished_handoffs: records of ended hand-offs kept to recognise late messages.
    """

    backend: BackendName = BackendName.AUTO
    host: str = "127.0.0.1"
    ports: str = ""
    lease_s: float = 120.0
    op_timeout_s: float = 15.0
    connect_timeout_s: float = 10.0
    rpc_timeout_s: float = 5.0
    rpc_attempts: int = 3
    repair_s: float = 2.0
    piece_attempts: int = 3
    pipeline_depth: int = 4
    max_piece_bytes: int = 64 << 20
    device_piece_bytes: int = 512 << 20
    staging_bytes: int = 128 << 20
    staging_memory_bytes: int = 1 << 30
    nccl_ctas: int = 4
    staging_ctas: int = 16
    copy_ctas: int = 66
    max_peers: int = 64
    finished_handoffs: int = 4096
    checksum: ChecksumKind = ChecksumKind.AUTO

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def piece_bytes(self, backend: str) -> int:
        """Upper size of a piece that travels by `backend`."""
        return self.device_piece_bytes if backend in ON_DEVICE else self.max_piece_bytes

    @property
    def device_memory_bytes(self) -> int:
        """GPU memory that the links of a rank need."""
        staged = self.backend in (BackendName.AUTO, BackendName.NCCL)
        return self.staging_memory_bytes if staged else 0

    def checksum_kind(self, backend: str) -> ChecksumKind:
        """How the bytes of a piece that travels by `backend` are summed."""
        if self.checksum is not ChecksumKind.AUTO:
            return self.checksum
        return ChecksumKind.NONE if backend in ON_DEVICE else ChecksumKind.CRC32
