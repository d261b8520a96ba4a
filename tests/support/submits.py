"""Requests to a worker, and what a small one can hold."""

from __future__ import annotations

from protocol.ids import RequestKey, Role
from protocol.kv_layout import KVLayout
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from worker_runtime.control.control_service import WorkerLimits

KEY = RequestKey("q")
LIMITS = WorkerLimits(
    layout=KVLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        block_size=4,
        num_blocks=10,
        dtype="float32",
        rank_heads=((0, 1),),
    ),
    vocab_size=100,
    max_model_len=50,
    capacity=dict.fromkeys(Role, 40),
)


def make_submit(
    prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **sampling: object
) -> Submit:
    """A request of KEY for five tokens."""
    params = SamplingParams(**{"max_tokens": 5, **sampling})  # type: ignore[arg-type]
    return Submit(
        key=KEY,
        router_id="r",
        prompt_ids=prompt,
        output_ids=output,
        sampling=params,
        time_left_s=1e12,
    )
