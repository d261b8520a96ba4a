"""Tensor-parallel ranks on several GPUs against the plain model of one rank on the CPU."""

import pytest
import torch
from torch.distributed import TCPStore

from engine.cuda.group import DeviceGroup, ReduceKind
from engine.kernels.triton.reduce import reduce_normed
from tests.support.apart import apart
from tests.support.cuda import (
    FAMILIES,
    Reference,
    for_groups,
    make_runner,
    mixed_script,
    tiny_config,
)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
#: Every family; Gemma 3 with KV heads that are replicated.
CONFIGS = {name: changes | HEADS for name, (changes, _) in FAMILIES.items()}
#: Those that also have graphs of steps with prompt chunks; capturing them takes a second each.
GRAPHED = ("llama", "olmo2", "gemma3")
CONFIGS["gemma3"] |= {"num_attention_heads": 4, "num_key_value_heads": 1}


def join(rank, size, port):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    return DeviceGroup(store, rank, size, device, name=f"test-{port}"), device


def run_models(rank, size, port):
    """One rank's whole life; its tokens of every family."""
    group, device = join(rank, size, port)
    results = {}
    for name, changes in CONFIGS.items():
        graphs = name in GRAPHED
        runner = make_runner(device, tiny_config(**changes), rank, size, prompt_graphs=graphs)
        runner.start(group)
        results[name] = [runner.run(for_groups(b, runner.layout)).tokens for b in mixed_script()]
    group.close()
    return results


def run_reductions(rank, size, port):
    """Every kind of all-reduce, many times over, in and out of a graph, against local sums."""
    group, device = join(rank, size, port)
    for kind in ReduceKind:
        for rows in (1, 3):
            h = torch.empty(rows, 4096, dtype=torch.bfloat16, device=device)
            for seed in range(50):
                parts = [part(peer, seed, h) for peer in range(size)]
                check(group, kind, parts, rank, h, lambda run: run())
            stream = torch.cuda.Stream(device)
            parts = [part(peer, 99, h) for peer in range(size)]
            check(group, kind, parts, rank, h, lambda run, s=stream: replay(run, s))
    check_normed_sums(group, rank, size, device)
    group.close()


def check_normed_sums(group, rank, size, device):
    """Sums that go straight into a norm, among others, in and out of a graph."""
    gain = part(0, 12345, torch.empty(4096, device=device)).bfloat16()
    h = torch.zeros(1, 4096, dtype=torch.bfloat16, device=device)
    for rows in (2, 3, 8, 64):
        start = part(0, rows, torch.empty(rows, 4096, device=device)).bfloat16()
        parts = [part(peer, rows + 1, start) for peer in range(size)]
        mine = start.clone()

        def run(mine=mine, parts=parts, start=start):
            mine.copy_(start)
            into = group.normed_sum(mine)
            into.partial.copy_(parts[rank])
            reduce_normed(into, mine, gain, 1e-5, pdl=True)
            group.reduce_by(
                ReduceKind.ONE_SHOT, group.partial_for(ReduceKind.ONE_SHOT, h).zero_(), h
            )
            group.end_step()
            return into.out

        want = start.float() + torch.stack(parts).float().sum(0)
        want = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5) * gain.float()
        for _ in range(20):
            got = run().clone()
            torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)
        replay(run, torch.cuda.Stream(device))
        torch.testing.assert_close(group.normed_sum(mine).out.float(), want, rtol=3e-2, atol=3e-2)
        group.end_step()
    assert not group.failed.any()


def part(peer, seed, like):
    generator = torch.Generator(like.device).manual_seed(1000 * seed + peer)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def check(group, kind, parts, rank, h, how):
    partial = group.partial_for(kind, h)

    def run():
        partial.copy_(parts[rank])
        group.reduce_by(kind, partial, h)
        group.end_step()

    how(run)
    want = torch.stack(parts).float().sum(0)
    torch.testing.assert_close(h.float(), want, rtol=2e-2, atol=2e-2)


def replay(run, stream):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(7):
            run()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()


def on_ranks(what, size, *args):
    """What rank 0 returns of `what(rank, size, port, *args)`."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    return apart([(what, (rank, size, store.port, *args)) for rank in range(size)], timeout_s=200)[
        0
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_every_all_reduce_gives_the_sum(size):
    on_ranks(run_reductions, size)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_tokens_of_one(size):
    got = on_ranks(run_models, size)
    for name, changes in CONFIGS.items():
        reference = Reference(tiny_config(**changes))
        layout = reference.open()
        assert got[name] == [reference.run(for_groups(b, layout)).tokens for b in mixed_script()]
