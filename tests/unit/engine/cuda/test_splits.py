"""How the contexts of a step's decode rows are cut, as tables for its graph."""

from dataclasses import replace as replace_fields

from engine.cuda.dense import AttentionSizes
from engine.cuda.inputs import DecodeInputs
from engine.cuda.options import CudaOptions, StepShapes
from engine.cuda.splits import SplitPlanner
from protocol.kv_layout import ONE_GROUP
from tests.unit.engine.cuda.test_plan import CPU, GROUPS, LIMITS, lay_out, plan, seq, windowed


def split_planner(groups=ONE_GROUP, codes=False):
    options = CudaOptions(max_batch=64, max_chunk_tokens=4096)
    sizes = AttentionSizes(num_heads=32, kv_heads=8, head_dim=128, scale=1.0, codes=codes)
    return SplitPlanner(sizes, groups, StepShapes.of(options, 8))


def splits_of(table):
    """Splits of each row."""
    return {code & 0xFFFF: code >> 24 for code in table[1:].tolist()}


def test_contexts_of_decode_rows_are_cut_by_their_length():
    many, limits = split_planner(), replace_fields(LIMITS, max_batch=64)
    few = plan(*[seq(1, 300)] * 4, limits=limits)
    assert many.plan(few) == ()  # a graph of its own cuts long contexts
    assert few.splits == ()
    step = plan(seq(1, 5500), *[seq(1, 300)] * 20, limits=limits)
    (table,) = many.plan(step)
    splits = splits_of(table)
    assert sorted(splits) == list(range(32))  # padding too: its output becomes zeros
    assert splits[0] == 10
    assert splits[1] == splits[20] == 2
    assert splits[21] == splits[31] == 1
    coded = split_planner(codes=True)
    assert splits_of(coded.plan(step)[0])[0] == 8
    beside_fewer_heads = replace_fields(coded, shapes=StepShapes.of(CudaOptions(), 1))
    step = plan(seq(1, 5500), *[seq(1, 300)] * 9, limits=limits)
    (table,) = beside_fewer_heads.plan(step)
    assert splits_of(table)[0] == 8  # of the 44 tiles that the graph of a long context takes


def test_contexts_beside_chunks_are_cut_as_their_shape_has_room():
    planner, limits = split_planner(), replace_fields(LIMITS, max_batch=64)
    step = plan(seq(1, 5500), *[seq(1, 300)] * 50, seq(60, 0), limits=limits)
    layout = lay_out(step, planner.shapes.mixed, heads=32, kv_heads=8, packed_tokens=16)
    assert layout.shape.decode_programs == 1280
    (table,) = planner.plan(replace_fields(step, layout=layout))
    assert len(table) - 1 <= 160
    splits = splits_of(table)
    assert sorted(splits) == list(range(51))  # what lies behind belongs to the chunks
    assert splits[0] > 1
    by_kind = lay_out(step, (), heads=32, kv_heads=8)
    (table,) = planner.plan(replace_fields(step, layout=by_kind))
    assert sorted(splits_of(table)) == list(range(51))
    alone = plan(seq(60, 0), limits=limits)
    layout = lay_out(alone, planner.shapes.mixed, heads=32, kv_heads=8, packed_tokens=16)
    assert planner.plan(replace_fields(alone, layout=layout)) == ()


def test_contexts_in_a_window_are_as_long_as_it():
    limits = replace_fields(LIMITS, groups=GROUPS, max_batch=64)
    step = plan(windowed(1, 4600), *[windowed(1, 300)] * 20, limits=limits)
    full, window = split_planner(GROUPS).plan(step)
    assert splits_of(full)[0] == 9
    assert set(splits_of(window).values()) == {1, 2}
    inputs = DecodeInputs(64, 4000, CPU, block_size=16, groups=GROUPS, max_splits=200)
    inputs.upload(replace_fields(step, splits=(full, window)))
    assert inputs.splits[0][: len(full)].tolist() == full.tolist()
    assert inputs.splits[1][: len(window)].tolist() == window.tolist()
    inputs.upload(plan(windowed(1, 300), limits=limits))
    assert inputs.splits[:, 0].tolist() == [0, 0]
