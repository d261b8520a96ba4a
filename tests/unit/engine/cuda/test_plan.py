"""What the CUDA engine decides before anything touches a GPU."""

import random
from dataclasses import replace as replace_fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("triton", reason="triton is not installed")

from engine.batch import SequenceStep, StepBatch
from engine.config import EngineConfig
from engine.cuda import build
from engine.cuda.inputs import ChunkCapacity, ChunkInputs, DecodeInputs
from engine.cuda.memory import blocks_that_fit
from engine.cuda.options import CudaOptions, StepShape, StepShapes, graph_batches
from engine.cuda.plan import (
    LONG_CONTEXT,
    AttentionPlanner,
    BatchLimits,
    history_segments,
    plan_step,
)
from engine.cuda.staging import DeviceStream, GraphSet, StagingRing
from engine.cuda.warmup import largest_prompts, warmup_steps
from engine.errors import ModelRefused, RankLost
from engine.executor import build_executor
from engine.kernels.sampling import noise_key
from engine.kernels.triton.attention import decode_shape
from engine.kernels.triton.linear import default_shape
from engine.model.families import parse_model_config
from protocol.errors import Internal, InvalidRequest
from protocol.kv_layout import ONE_GROUP, KVGroup
from protocol.sampling import SamplingParams

CPU = torch.device("cpu")
LIMITS = BatchLimits(
    block_size=16,
    num_blocks=400,
    vocab_size=100,
    max_model_len=6000,
    max_batch=6,
    max_chunk_tokens=4096,
)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=77)


def seq(count, start, sampling=GREEDY, **more):
    blocks = tuple(range(-(-(start + count) // 16)))
    tokens = tuple(i % 100 for i in range(count))
    return SequenceStep(
        tokens=tokens, start=start, block_tables=(blocks,), sampling=sampling, **more
    )


def plan(*sequences, previous=(), limits=LIMITS):
    return plan_step(StepBatch(sequences=sequences), limits, list(previous))


def test_decodes_come_first_and_results_find_their_way_back():
    result = plan(seq(20, 0), seq(1, 7), seq(30, 16, None), seq(1, 3, None), seq(2, 0, WARM))
    assert [step.start for step in result.decodes] == [7, 3]
    assert [len(step.tokens) for step in result.chunks] == [20, 30, 2]
    assert result.results == [2, 0, None, None, 3]
    assert [step.start for step in result.sampled] == [7, 3, 0, 0]
    assert result.chunk_blocks == [2, 3, 1]
    assert result.filtered
    assert not result.long_context


def test_banned_ids_name_the_row_of_the_logits():
    result = plan(seq(20, 0, banned=(5,)), seq(1, 7, banned=(1, 2)))
    assert result.banned == [(0, 1), (0, 2), (1, 5)]
    assert not result.filtered


def test_a_token_can_come_from_the_step_before():
    result = plan(seq(1, 7, previous=2), seq(1, 8), previous=[None, 4, 1])
    assert result.feeds == [1, -1]


def test_long_contexts_are_seen():
    assert plan(seq(1, LONG_CONTEXT)).long_context


@pytest.mark.parametrize(
    "bad",
    [
        SequenceStep(tokens=(), start=0, block_tables=((0,),), sampling=None),
        SequenceStep(tokens=(100,), start=0, block_tables=((0,),), sampling=None),
        SequenceStep(tokens=(-1,), start=0, block_tables=((0,),), sampling=None),
        SequenceStep(tokens=(1,), start=16, block_tables=((0,),), sampling=None),
        SequenceStep(tokens=(1,), start=0, block_tables=((400,),), sampling=None),
        SequenceStep(tokens=(1,), start=-1, block_tables=((0,),), sampling=None),
        SequenceStep(tokens=(1, 2), start=0, block_tables=((0,),), sampling=None, previous=0),
        SequenceStep(tokens=(1,), start=0, block_tables=((0,),), sampling=None, previous=0),
        seq(1, 6000),
        seq(4097, 0),
    ],
)
def test_what_is_out_of_range_is_refused(bad):
    with pytest.raises(Internal):
        plan(bad, previous=[None])


def test_too_many_sequences_are_refused():
    with pytest.raises(Internal, match="more than 6"):
        plan(*(seq(1, 0) for _ in range(7)))


def lay_out(result, shapes=(), *, heads=8, kv_heads=2, groups=ONE_GROUP, **options):
    planner = AttentionPlanner(
        groups=groups,
        block_size=16,
        heads=heads,
        kv_heads=kv_heads,
        tile=128,
        **{"dense": False} | options,
    )
    return planner.lay_out(result, shapes)


def chunk_inputs():
    return ChunkInputs(ChunkCapacity(rows=4102, kept=4102, tiles=200, blocks=800), CPU)


def test_decode_rows_lie_where_the_kernels_read_them():
    inputs = DecodeInputs(4, 64, CPU, block_size=16)
    result = plan(seq(1, 20, WARM), seq(1, 3, previous=0), previous=[2])
    inputs.upload(result)
    assert inputs.lengths.tolist() == [21, 4, 0, 0]
    assert inputs.feed[:2].tolist() == [-1, 2]
    assert inputs.starts.tolist() == [[0, 2, 0, 0]]
    assert inputs.blocks[:3].tolist() == [0, 1, 0]
    sampling = inputs.sampling(2, filtered=True)
    assert sampling.temperature.tolist() == [0.5, 0.0]
    assert sampling.top_k[0] == 3
    assert sampling.top_p[0].item() == np.float32(0.9)
    assert sampling.min_p[0].item() == np.float32(0.1)
    assert tuple(sampling.keys[0].tolist()) == noise_key(77, 21)


def test_rows_of_an_earlier_larger_step_become_padding():
    inputs = DecodeInputs(4, 64, CPU, block_size=16)
    for count in (4, 1):
        inputs.upload(plan(*(seq(1, 5) for _ in range(count))))
    assert inputs.lengths.tolist() == [6, 0, 0, 0]


def test_tables_that_do_not_fit_are_refused():
    inputs = DecodeInputs(2, 3, CPU, block_size=16)
    with pytest.raises(Internal, match="4 blocks in one step"):
        inputs.upload(plan(seq(1, 20), seq(1, 20)))


@pytest.mark.parametrize(("dense", "own"), [(False, 0), (True, 0), (True, 1030), (True, 1029)])
def test_chunks_are_packed_and_the_long_ones_set_apart(dense, own):
    result = plan(seq(5, 16), seq(1030, 0), seq(3, 0, None), seq(1, 7), seq(1100, 2064))
    layout = lay_out(result, dense=dense, own_tokens=own)
    inputs = chunk_inputs()
    inputs.upload(result, layout, 16)
    assert layout.rows == layout.padded_rows == 2139
    assert layout.first_rows == (1, 6, 1036, 1039)
    assert layout.kept == (0, 5, 1035, 2138)
    assert inputs.positions[:7].tolist() == [0, 16, 17, 18, 19, 20, 0]
    (slots,) = inputs.slots
    assert slots[:6].tolist() == [-1, 16, 17, 18, 19, 20]
    assert inputs.kept[:4].tolist() == [0, 5, 1035, 2138]
    assert inputs.feed[:2139].unique().tolist() == [-1]
    tables = [(table.first, table.count) for table in layout.tables[0]]
    assert tables == [(0, 2), (4, 65), (72, 1), (76, 198)]
    assert inputs.blocks[76:80].tolist() == [0, 1, 2, 3]
    (cut,) = layout.cuts
    paged = cut.tiles[: len(cut.paged)]
    firsts = sorted({int(row) for row in paged[:, 0]})
    rows = cut.tiles[cut.windowed.start : cut.windowed.stop]
    assert sum(rows[:, 1]) == (1030 if own == 1030 else 0)
    if own == 1030:
        assert {row for at, n, *_ in rows for row in range(at, at + n)} == set(range(6, 1036))
        assert (rows[:, 2] == 6).all()
        assert rows[:, 4].max() == 1036
        assert [chunk.first for chunk in cut.dense] == [1039]
    elif dense:
        long, after = cut.dense
        assert firsts == [1, 1036]
        assert (long.first, long.count, long.segments) == (6, 1030, ())
        assert (after.first, after.count, after.segments) == (1039, 1100, (2048,))
        assert after.table == 76
        rest = cut.tiles[after.tiles.start : after.tiles.stop]
        assert rest[:, 4:6].tolist() == [[2048, 2064]] * 9
        assert sorted(rest[:, 0]) == list(range(1039, 2139, 128))
        assert layout.overhang == 1039 + 1536 - 2139
    else:
        assert cut.dense == ()
        assert layout.overhang == 0
        assert len(cut.tiles) == len(paged)
        assert firsts[:3] == [1, 6, 134]


OPTIONS = CudaOptions(max_batch=6, max_chunk_tokens=4096)
SHAPES = StepShapes.of(OPTIONS, 2).mixed


@pytest.mark.parametrize("heads", [8, 32])
def test_steps_of_some_hundreds_of_rows_run_in_a_shape_that_has_a_graph(heads):
    result = plan(seq(1, 1500), seq(64, 2048), seq(1, 20), seq(30, 0, None))
    layout = lay_out(result, SHAPES, heads=heads)
    (cut,), shape = layout.cuts, layout.shape
    assert (layout.rows, layout.padded_rows) == (96, 96)
    assert shape == StepShape(rows=96, samples=6, chunk_programs=384, decode_programs=1280)
    assert heads * len(cut.tiles) <= 384
    inputs = chunk_inputs()
    smaller = plan(seq(1, 1500), seq(20, 16))
    for step in (result, smaller):
        layout = lay_out(step, SHAPES, heads=heads)
        inputs.upload(step, layout, 16)
    (slots,), (counts,) = inputs.slots, inputs.counts
    assert counts.tolist() == [len(layout.cuts[0].tiles)]
    assert slots[:33].tolist() == [-1, *range(16, 36), *([-1] * 11), *slots[32:33]]
    assert inputs.kept[:6].tolist() == [0, 20, 0, 0, 0, 0]


GROUPS = (KVGroup(), KVGroup(window=100))


def windowed(count, start):
    """A step whose second group has blocks from the first that its first token sees."""
    first = max(0, start - 99) // 16
    blocks = tuple(range(100, 100 + -(-(start + count) // 16)))
    return replace(seq(count, start), block_tables=(blocks, blocks[first:]))


@pytest.mark.parametrize("shapes", [(), SHAPES])
def test_a_group_with_a_window_has_its_own_tables_and_shorter_contexts(shapes):
    """Only blocks within the window are in its table, addressed as if all were."""
    limits = replace_fields(LIMITS, groups=GROUPS)
    steps = (windowed(64, 2048), windowed(1, 1500), windowed(1, 30), windowed(30, 0))
    result = plan_step(StepBatch(sequences=steps), limits, [])
    layout = lay_out(result, shapes, groups=GROUPS)
    decodes = DecodeInputs(6, 400, CPU, block_size=16, groups=GROUPS)
    chunks = ChunkInputs(ChunkCapacity(rows=4102, kept=4102, tiles=200, blocks=800, groups=2), CPU)
    decodes.upload(result)
    chunks.upload(result, layout, 16)
    for group, seen in enumerate(GROUPS):
        for row, step in enumerate(result.decodes):
            for block in range(seen.first_token(step.start) // 16, step.start // 16 + 1):
                assert decodes.blocks[decodes.starts[group, row] + block] == 100 + block
        slots = chunks.slots[group]
        assert slots[:2].tolist() == [-1, -1]
        assert slots[2:66].tolist() == [1600 + at for at in range(2048, 2112)]
        tiles = layout.cuts[group].tiles
        assert {tuple(row) for row in tiles[:, 1:3].tolist()} == {(64, 2048), (30, 0)}
        for _, _, start, table, begin, *_ in tiles.tolist():
            number = begin // 16
            assert chunks.blocks[table + number] == 100 + number
            assert begin >= seen.first_token(start)
    assert sum(table.count for table in layout.tables[0]) == 132 + 2
    assert sum(table.count for table in layout.tables[1]) == 132 - 121 + 2


@pytest.mark.parametrize("counts", [[64], [256], [512], [496, 7], [60] * 8, [3] * 40, [700], [176]])
def test_heads_that_share_tiles_need_no_larger_shape_than_their_rows(counts):
    """However many tiles a step has; they cover each query and what it sees once."""
    shapes = StepShapes.of(CudaOptions(max_batch=64, max_chunk_tokens=4096), 8).mixed
    chunks = [seq(count, 2048) for count in counts]
    limits = replace_fields(LIMITS, max_batch=64)
    step = plan(*[seq(1, 1500)] * 4, *chunks, limits=limits)
    layout = lay_out(step, shapes, heads=32, kv_heads=8, packed_tokens=16)
    (cut,), shape = layout.cuts, layout.shape
    assert shape.decode_programs == 1280
    assert shape.rows == next(s.rows for s in shapes if s.rows >= 4 + sum(counts))
    seen = {}
    for first, count, start, _, begin, end, *_ in cut.tiles.tolist():
        assert count <= 16
        assert begin <= start
        assert begin % 16 == 0
        for token in range(first, first + count):
            seen.setdefault(token, []).append((begin, end))
    assert sorted(seen) == list(range(4, 4 + sum(counts)))
    for parts in seen.values():
        cuts = sorted(parts)
        assert cuts[0][0] == 0
        assert all(one[1] == other[0] for one, other in pairwise(cuts))
        assert cuts[-1][1] > 2048


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(1, 2, 3), (3, 4, 4), (13, 14, 1)]),
    st.integers(0, 100),
    st.lists(st.sampled_from([2, 60, 200, 600]), min_size=1, max_size=5),
    st.sampled_from([0, 1600, 5200]),
)
@example((13, 14, 1), 95, [2], 0)
@example((13, 14, 1), 0, [200], 5200)
def test_ranks_with_unequal_heads_choose_the_same_graph(heads, decodes, counts, start):
    """Reductions between them are in it."""
    few, many, group = heads
    shapes = StepShapes.of(CudaOptions(max_batch=128, max_chunk_tokens=4096), few).mixed
    limits = replace_fields(LIMITS, max_batch=128)
    chunks = [seq(count, start) for count in counts]
    step = plan(*[seq(1, 100)] * decodes, *chunks, limits=limits)
    ranks = [
        AttentionPlanner(
            groups=ONE_GROUP, block_size=16, heads=n * group, kv_heads=n, tile=128, dense=False
        )
        for n in (few, many)
    ]
    layouts = [
        replace_fields(one, others=(other,)).lay_out(step, shapes)
        for one, other in (ranks, reversed(ranks))
    ]
    assert layouts[0].shape == layouts[1].shape


def test_heads_share_tiles_in_steps_of_several_graphs():
    large = lay_out(plan(seq(1300, 0)), SHAPES, packed_tokens=16)
    assert large.shape is not None
    assert large.cuts[0].tiles[:, 1].max() == 16


def test_layers_with_a_window_keep_tiles_of_one_head():
    limits = replace_fields(LIMITS, groups=GROUPS)
    result = plan(windowed(64, 2048), windowed(1, 1500), limits=limits)
    layout = lay_out(result, SHAPES, groups=GROUPS, packed_tokens=16)
    shared, apart = layout.cuts
    assert shared.tiles[:, 1].max() == 16
    assert apart.tiles[:, 1].max() == 64


def test_steps_that_no_shape_holds_are_launched_by_kind():
    scored = plan(seq(20, 0, None, targets=(1,) * 20))
    large = plan(seq(1400, 0), seq(1, 7))
    assert lay_out(scored, SHAPES).shape is None
    assert lay_out(scored, SHAPES).kept == tuple(range(20))
    assert lay_out(large, SHAPES).shape is None
    many = plan(seq(700, 0), *(seq(1, 7) for _ in range(5)))
    found = [lay_out(many, SHAPES, heads=32, kv_heads=heads).shape for heads in (8, 300, 900)]
    assert [shape and shape.decode_programs for shape in found] == [1280, 4096, None]
    alone = lay_out(plan(seq(300, 0), seq(8, 0))).shape
    assert alone is None
    alone = lay_out(plan(seq(300, 0), seq(8, 0)), SHAPES).shape
    assert (alone.rows, alone.decode_programs, alone.samples) == (320, 0, 6)


def test_the_last_layer_attends_for_the_tokens_that_are_sampled():
    step = plan(seq(1, 7), seq(1100, 0), seq(500, 3000, None), seq(70, 5))
    layout = lay_out(step, dense=True, last=0)
    (cut,), whole = layout.cuts, lay_out(step, dense=True).cuts[0]
    assert whole.ends is None
    assert np.array_equal(cut.tiles[: cut.ends.start], whole.tiles)
    ends = cut.tiles[cut.ends.start : cut.ends.stop].tolist()
    assert {(row, count, start) for row, count, start, *_ in ends} == {
        (1100, 1, 1099),
        (1670, 1, 74),
    }
    spans = sorted(tile[4:6] for tile in ends if tile[0] == 1100)
    assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, 1100)
    scored = plan(seq(1100, 0), seq(20, 0, None, targets=(1,) * 20))
    assert lay_out(scored, last=0).cuts[0].ends is None


def test_a_history_begins_with_the_longest_segments():
    assert history_segments(0) == history_segments(2047) == ()
    assert history_segments(8192 * 2 + 2048 * 3 + 5) == (8192, 8192, 2048, 2048, 2048)


def test_every_vector_of_a_step_is_aligned():
    """Kernels are compiled for aligned pointers; another alignment would cost a second of it."""
    inputs = chunk_inputs()
    rng = random.Random(3)
    vectors = [*inputs.counts, inputs.tokens, inputs.feed, inputs.positions, *inputs.slots]
    vectors += [inputs.kept, inputs.blocks, *(tiles[1:] for tiles in inputs.tiles)]
    base = inputs._ints.data_ptr()
    assert all((vector.data_ptr() - base) % 16 == 0 for vector in vectors)
    for _ in range(60):
        steps = [
            seq(rng.randint(2, 70), 16 * rng.randint(0, 2), rng.choice([None, SamplingParams()]))
            for _ in range(rng.randint(1, 6))
        ]
        result = plan(*steps)
        layout = lay_out(result)
        inputs.upload(result, layout, 16)
        assert all(table.first % 4 == 0 for table in layout.tables[0])
        assert inputs.positions[: layout.rows].tolist() == [
            step.start + i for step in result.chunks for i in range(len(step.tokens))
        ]


@pytest.mark.parametrize(
    ("max_model_len", "max_chunk_tokens", "longest"),
    [(2, 128, 0), (30, 128, 28), (128, 128, 40), (1024, 1361, 1360)],
)
def test_what_is_run_before_serving_is_sound(max_model_len, max_chunk_tokens, longest):
    """Where a context is shorter than the largest graph, too."""
    limits = BatchLimits(
        block_size=16,
        num_blocks=1,
        vocab_size=203,
        max_model_len=max_model_len,
        max_batch=4,
        max_chunk_tokens=max_chunk_tokens,
    )
    batches = warmup_steps(
        block_size=16,
        max_model_len=max_model_len,
        max_chunk_tokens=max_chunk_tokens,
        vocab_size=203,
        graph_tokens=max_chunk_tokens - 33,
        max_sequences=4,
    )
    plans = [plan_step(batch, limits, []) for batch in batches]
    assert {plan.filtered for plan in plans} == {True, False}
    assert any(plan.decodes and plan.chunks for plan in plans) == (max_model_len > 2)
    assert max(sum(map(len, plan.chunk_ids)) for plan in plans) == longest


@pytest.mark.parametrize(
    ("max_model_len", "max_sequences", "counts"),
    [(9000, 4, [8192]), (8193, 4, [8192]), (3001, 4, [3000, 3000, 2192]), (3001, 2, [3000, 3000])],
)
def test_memory_is_measured_with_as_many_prompt_tokens_as_a_step_can_have(
    max_model_len, max_sequences, counts
):
    prompts = largest_prompts(
        max_tokens=8192, max_sequences=max_sequences, max_model_len=max_model_len, block_size=16
    )
    assert [len(prompt.tokens) for prompt in prompts] == counts
    limits = BatchLimits(
        block_size=16,
        num_blocks=1,
        vocab_size=203,
        max_model_len=max_model_len,
        max_batch=max_sequences,
        max_chunk_tokens=8192,
    )
    assert plan_step(StepBatch(sequences=tuple(prompts)), limits, []).chunks == prompts


def test_graphs_hold_every_batch_and_splits_stay_within_the_scratch():
    for largest in (1, 5, 64, 256):
        sizes = graph_batches(largest)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == largest
    for batch in graph_batches(256):
        for long_context in (False, True):
            shape = decode_shape(batch, 8, 128, long_context)
            assert (shape.splits == 0) == (batch >= 8)
            assert batch * shape.splits <= 4096
            wide = decode_shape(batch, 8, 128, long_context, codes=True)
            assert wide.splits == shape.splits <= 128
            assert (wide.tile == 128) == (long_context or batch >= 8)
            assert (
                wide.tile * wide.min_tiles == shape.tile * shape.min_tiles or shape.min_tiles == 1
            )
    assert decode_shape(1, 8, 128, False).splits == 66


def test_every_launch_shape_is_a_power_of_two():
    for n, k, gated in (
        (6144, 4096, False),
        (2560, 8192, False),
        (14336, 4096, True),
        (7, 96, False),
    ):
        shape = default_shape(n, k, gated)
        for value in (shape.block_n, shape.block_k, shape.warps):
            assert value & (value - 1) == 0


def test_blocks_that_fit():
    figures = {"working_bytes": 30, "share": 0.9, "reserve_bytes": 10}
    assert blocks_that_fit(free_bytes=1000, block_bytes=100, **figures) == 8
    with pytest.raises(ModelRefused, match="no room for KV blocks"):
        blocks_that_fit(free_bytes=100, block_bytes=100, **figures)


@pytest.mark.parametrize("field", ["max_batch", "max_chunk_tokens"])
def test_options_name_the_field_at_fault(field):
    with pytest.raises(InvalidRequest) as caught:
        CudaOptions(**{field: 0})
    assert caught.value.param == field


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    model = parse_model_config(LLAMA_8B)
    assert build.num_parameters(model) == pytest.approx(8.03e9, rel=1e-3)
    config = EngineConfig(model_path="m", device="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14 << 30, 16 << 30))
    with pytest.raises(ModelRefused, match=r"take 15\.0 GiB") as caught:
        build.check_fits(config, model, CPU)
    assert caught.value.param == "tp_size"
    two = EngineConfig(model_path="m", device="cuda", tp_size=2)
    build.check_fits(two, model, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_device_is_refused():
    with pytest.raises(ModelRefused, match="no CUDA device") as caught:
        build_executor(EngineConfig(model_path="m", device="cuda"))
    assert caught.value.param == "device"


def test_without_triton_the_device_is_refused(monkeypatch):
    monkeypatch.setattr("engine.executor.find_spec", lambda name: None)
    with pytest.raises(ModelRefused, match="needs triton"):
        build_executor(EngineConfig(model_path="m", device="cuda"))


def test_larger_steps_of_the_configuration_are_served():
    usual = CudaOptions()
    assert build.options_for(EngineConfig(model_path="m")) == usual
    asked = build.options_for(EngineConfig(model_path="m", max_running=300, max_step_tokens=9000))
    assert (asked.max_batch, asked.max_chunk_tokens) == (300, 9000)


class FakeEvent:
    """Done after it was asked a few times."""

    def __init__(self, looks):
        self.looks = looks

    def query(self):
        self.looks -= 1
        return self.looks <= 0


def test_a_watched_wait_ends_with_the_event_or_with_the_watchers_error():
    ring = StagingRing(4, 1, CPU)
    seen = []
    ring._events[0] = FakeEvent(4)
    ring.wait(0, lambda: seen.append(1))
    assert len(seen) == 3

    def lost():
        raise RankLost("rank 1 is gone", param="tp")

    ring._events[0] = FakeEvent(10**9)
    with pytest.raises(RankLost):
        ring.wait(0, lost)


def test_a_large_step_is_several_graphs_and_tells_which_layers_have_ended(monkeypatch):
    done = []

    class Graph:
        """Replays what was noted while it was captured."""

        def capture_begin(self, pool):
            assert not done

        def capture_end(self):
            self.work = tuple(done)
            done.clear()

        def pool(self):
            return "pool"

        def replay(self):
            done.extend(self.work)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.clear())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run(shape):
        for layer in range(6):
            graphs.begins(layer)
            done.append(layer)

    graphs = GraphSet(run, DeviceStream(CPU), 6, done.append)
    large, small = (StepShape(rows=rows, samples=4, chunk_programs=64) for rows in (900, 600))
    graphs.capture_all([large, small])
    graphs.run(large)
    assert done == [0, 1, slice(0, 2), 2, 3, slice(2, 4), 4, 5]
    done.clear()
    graphs.run(small)
    assert done == [*range(6)]
