"""Dense copies of running sequences: never anything but what the pool holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from engine.batch import StepBatch
from engine.inputs import StepLimits, prepare_step
from engine.kernels import reference
from engine.kernels.base import Geometry, StepInputs
from engine.kernels.cpu import CpuKernels
from engine.kv.allocator import BlockAllocator
from engine.kv.pool import KVPool
from engine.local import LocalEngine
from protocol.kv_layout import Cells, KVLayout
from protocol.sampling import SamplingParams
from tests.support.engine import chunk, config, prompt

BLOCK, DIM, NUM_BLOCKS, LAYERS = 4, 8, 48, 2
GEOMETRY = Geometry(
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=DIM,
    block_size=BLOCK,
    scale=0.35,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
LAYOUT = KVLayout(
    num_layers=LAYERS,
    num_kv_heads=2,
    head_dim=DIM,
    block_size=BLOCK,
    num_blocks=NUM_BLOCKS,
    dtype="float32",
    rank_heads=((0, 2),),
)
LIMITS = StepLimits(block_size=BLOCK, num_blocks=NUM_BLOCKS, vocab_size=1, max_model_len=400)
COS, SIN = torch.ones(400, DIM // 2), torch.zeros(400, DIM // 2)


@dataclass
class Sequence:
    """A sequence with `length` tokens in the KV."""

    blocks: list[int]
    length: int


class World:
    """A mirrored pool and a plain one, given the same steps and the same outside writes."""

    def __init__(self, limit_bytes: int = 1 << 24) -> None:
        self.pool = KVPool(LAYOUT, 0, torch.float32, torch.device("cpu"))
        self.plain = self.pool.data.clone()
        self.kernels = CpuKernels(GEOMETRY)
        self.kernels.mirror_decodes(self.pool.data, self.pool.versions, limit_bytes)
        self.blocks = BlockAllocator(NUM_BLOCKS, BLOCK)

    @property
    def mirror(self):
        return self.kernels._mirror

    def room(self, sequence: Sequence, tokens: int) -> bool:
        missing = self.blocks.blocks_for(sequence.length + tokens) - len(sequence.blocks)
        fresh = self.blocks.allocate(max(0, missing))
        sequence.blocks += fresh or []
        return fresh is not None

    def receive(self, sequence: Sequence, tokens: int) -> None:
        """The KV of a prompt arrives from outside."""
        data = torch.randn(LAYERS, len(sequence.blocks), 2, 2, BLOCK, DIM)
        cells = Cells(blocks=tuple(sequence.blocks), size=BLOCK, count=len(sequence.blocks))
        self.pool.scatter(cells, range(LAYERS), range(2), data)
        self.plain[:, sequence.blocks] = data
        sequence.length = tokens

    def step(self, work: list[tuple[Sequence, int]]) -> StepInputs:
        """Run a step; every row of every layer must attend to what the plain pool holds."""
        steps = [chunk([0] * n, s.length, s.blocks) for s, n in work]
        batch = StepBatch(sequences=tuple(steps))
        inputs = prepare_step(batch, LIMITS).inputs
        plan = self.kernels.prepare(inputs, COS, SIN)
        starts = torch.tensor([0, *inputs.queries]).cumsum(0)
        width = max(map(len, inputs.block_ids))
        table = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in inputs.block_ids])
        for layer in range(LAYERS):
            qkv = torch.randn(inputs.num_tokens, 8 * DIM)
            row_cos, row_sin = COS[inputs.positions], SIN[inputs.positions]
            plain = self.plain[layer]
            q = reference.rope_and_write_kv(qkv.clone(), row_cos, row_sin, inputs.slots, plain, 4)
            contexts = torch.tensor(inputs.contexts)
            want = reference.paged_attention(q, plain, starts, contexts, table, GEOMETRY.scale)
            kv = self.pool.layers[layer]
            got = self.kernels.paged_attention(
                self.kernels.rope_and_write_kv(qkv, kv, plan), kv, plan
            )
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(self.pool.data, self.plain)
        for sequence, tokens in work:
            sequence.length += tokens
        return inputs


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_steps_and_transfers_attends_to_the_pool(seed):
    torch.manual_seed(seed)
    dice, world, running = random.Random(seed), World(), []
    for _ in range(60):
        if dice.random() < 0.4 and len(running) < 7:
            sequence, tokens = Sequence([], 0), dice.randint(1, 30)
            if world.room(sequence, tokens + 1):
                if dice.random() < 0.5:
                    world.receive(sequence, tokens)
                    running.append(sequence)
                else:
                    world.step([(sequence, tokens), *decodes(world, running, dice, 0.7)])
                    running.append(sequence)
        if running and dice.random() < 0.25:
            world.blocks.free(running.pop(dice.randrange(len(running))).blocks)
        work = decodes(world, running, dice, 0.9)
        dice.shuffle(work)
        if work:
            world.step(work)


def decodes(world, running, dice, share):
    """One token of most of the running sequences that have room."""
    return [(s, 1) for s in running if dice.random() < share and world.room(s, 1)]


def arrived(world: World, tokens: int) -> Sequence:
    sequence = Sequence([], 0)
    assert world.room(sequence, tokens + 24)
    world.receive(sequence, tokens)
    return sequence


def test_a_running_batch_is_copied_once_and_then_only_added_to(monkeypatch):
    world = World()
    running = [arrived(world, tokens) for tokens in (20, 18, 11)]
    world.step([(s, 1) for s in running])
    fills = []
    monkeypatch.setattr(world.mirror, "_fill", lambda *args: fills.append(args))
    for _ in range(20):
        world.step([(s, 1) for s in running])
    world.step([(s, 1) for s in reversed(running)])
    assert fills == []


def test_a_sequence_that_leaves_or_joins_moves_no_other_but_the_last(monkeypatch):
    world = World()
    running = [arrived(world, tokens) for tokens in (20, 18, 17)]
    world.step([(s, 1) for s in running])
    fills, moves = [], []
    fill, move = world.mirror._fill, world.mirror._move
    monkeypatch.setattr(world.mirror, "_fill", lambda *a: (fills.append(a[0]), fill(*a)))
    monkeypatch.setattr(world.mirror, "_move", lambda *a: (moves.append(a[:2]), move(*a)))
    world.step([(s, 1) for s in running[1:]])
    assert (fills, moves) == ([], [(2, 0)])
    running.append(arrived(world, 15))
    world.step([(s, 1) for s in running[1:]])
    assert (fills, moves) == ([2], [(2, 0)])


def test_the_same_blocks_with_other_content_are_copied_again():
    world = World()
    first = arrived(world, 9)
    world.step([(first, 1)])
    second = Sequence(list(first.blocks), 0)
    world.receive(second, 10)  # same blocks, same length, another sequence's content
    world.step([(second, 1)])
    world.step([(Sequence(second.blocks, 0), 11)])  # rewritten by a prompt chunk
    world.step([(Sequence(second.blocks, 11), 1)])


def test_a_step_that_is_run_again_is_right_again():
    world = World()
    sequence = arrived(world, 9)
    for _ in range(3):
        world.step([(replace(sequence), 1)])


def test_beyond_the_limit_pages_are_gathered(monkeypatch):
    world = World(limit_bytes=1000)
    running = [arrived(world, tokens) for tokens in (20, 9)]
    for _ in range(3):
        assert world.step([(s, 1) for s in running]).num_decodes == 2
    assert world.mirror._layers == {}


def test_copies_shrink_when_long_sequences_have_left():
    world = World()
    long, short = arrived(world, 100), arrived(world, 10)
    world.step([(long, 1), (short, 1)])
    assert world.mirror._capacity == 128
    world.step([(short, 1)])
    assert world.mirror._capacity == 64


def test_an_engine_gives_the_same_ids_with_and_without(tiny):
    sampling = SamplingParams(temperature=1.0, max_tokens=50, ignore_eos=True)
    requests = [(prompt(length), replace(sampling, seed=length)) for length in (3, 9, 17, 40, 41)]
    outputs = [
        LocalEngine(
            config(tiny, num_blocks=26, decode_copy_bytes=copies, max_step_tokens=24)
        ).generate(requests)
        for copies in (0, 1 << 24)
    ]
    assert outputs[0] == outputs[1]
