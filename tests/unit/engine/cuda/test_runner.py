"""The CUDA runner against the plain model, on a GPU or (tiny) in triton's interpreter."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.batch import StepBatch, StepResult
from engine.cuda.comm import RankCollectives
from engine.cuda.options import graph_batches
from engine.errors import RankLost
from engine.executor import Executor
from protocol.errors import Internal
from tests.support.cuda import (
    FAMILIES,
    GREEDY,
    LOGGED,
    NUM_BLOCKS,
    SEEDED,
    for_groups,
    make_pair,
    make_runner,
    mixed_script,
    seq,
    tiny_config,
)

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture
def pair(device):
    return make_pair(device, tiny_config())


def assert_same(got: StepResult, want: StepResult) -> None:
    assert got.tokens == want.tokens
    wanted = flat(want)
    assert flat(got).keys() == wanted.keys()
    for at, entry in flat(got).items():
        assert (entry.rank, entry.top_ids) == (wanted[at].rank, wanted[at].top_ids)
        values = [entry.logprob, *entry.top_logprobs]
        assert values == pytest.approx([wanted[at].logprob, *wanted[at].top_logprobs], abs=1e-4)


def flat(result: StepResult) -> dict:
    entries = dict(result.logprobs)
    for index, row in result.target_logprobs.items():
        entries |= {(index, i): entry for i, entry in enumerate(row)}
    return entries


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_prompts_chunks_and_decodes_give_the_reference_tokens(device, family):
    """Llama's are those of the next test."""
    changes, num_batches = FAMILIES[family]
    runner, reference = make_pair(device, tiny_config(**changes))
    for batch in mixed_script()[:num_batches]:
        step = for_groups(batch, runner.layout)
        assert_same(runner.run(step), reference.run(step))
    got, want = runner.pool.data.cpu(), reference.pool.data
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt_graphs", [True, False])
def test_steps_of_every_shape_give_the_reference_tokens(device, monkeypatch, prompt_graphs):
    """With one graph for a step with chunks, with several, and kernel by kernel: then something
    else may run between the layers."""
    monkeypatch.setattr("engine.cuda.options._MIXED_ROWS", (64, 80))
    monkeypatch.setattr("engine.cuda.options._LARGE_ROWS", (96, 200))
    runner, reference = make_pair(device, tiny_config(), prompt_graphs=prompt_graphs)
    between: list[int] = []
    Executor(runner, fingerprint=None).while_launching(lambda: between.append(1))
    rows = [shape.rows for shape in runner._shapes.mixed]
    assert rows == [64, 64, 64, 80, 80, 80, 96, 96, 136, 136] * prompt_graphs
    assert runner.step_rows[-1:] == (136,) * prompt_graphs
    for batch in mixed_script():
        plan = runner.prepare(batch)
        if plan.layout is not None:
            graph = prompt_graphs and plan.scored is None
            assert (plan.layout.shape is not None) == graph
        between.clear()
        assert_same(runner.submit(plan).wait(), reference.run(batch))
        by_kernels = plan.layout is not None and plan.layout.shape is None
        assert len(between) == by_kernels * runner.model_config.num_layers
    torch.testing.assert_close(runner.pool.data.cpu(), reference.pool.data, rtol=1e-4, atol=1e-4)


def test_ranks_with_unequal_heads_capture_the_same_graphs(device):
    """The reductions in them wait for those of the others."""
    config = tiny_config(num_key_value_heads=3)
    ranks = [make_runner(device, config, rank, 2, max_batch=40) for rank in range(2)]
    assert [runner._shape.kv_heads for runner in ranks] == [1, 2]
    assert ranks[0]._shapes == ranks[1]._shapes


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("prompt_graphs", [True, False])
def test_sequences_that_are_not_finite_are_named_and_others_unharmed(device, prompt_graphs):
    """Decode rows, chunks that sample and chunks that do not, with log-probabilities and alone."""
    runner = make_runner(device, tiny_config(), prompt_graphs=prompt_graphs)
    runner.start()
    bad = 77
    with torch.inference_mode():
        runner.weights.embedding[bad] = torch.inf
    good = [seq([5], 0, (8,)), seq(range(9), 0, (9,)), seq(range(20), 0, (10, 11), sampling=None)]
    damaged = [
        seq([bad], 0, (0,)),
        seq([1, 2, bad, 3], 0, (1,), LOGGED),
        seq([1, 2, bad, 3], 0, (2,), sampling=None),
    ]
    whole = runner.run(StepBatch(sequences=(*damaged, *good)))
    assert whole.non_finite == {0, 1, 2}
    alone = runner.run(StepBatch(sequences=tuple(good)))
    assert alone.non_finite == frozenset()
    assert whole.tokens[3:] == alone.tokens
    following = seq([0], 1, (0,), previous=0)  # planned before the result was known
    runner.launch(StepBatch(sequences=tuple(damaged)))
    assert runner.run(StepBatch(sequences=(following, good[0]))).tokens[1] == alone.tokens[0]


class SilentPeer(RankCollectives):
    """A group of one whose kernels can give up waiting."""

    def __init__(self, device):
        super().__init__()
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def failed(self):
        return self.flag


def test_a_follower_stops_after_a_step_that_gave_up_waiting_for_a_peer(pair, device):
    """Its sums are wrong from there on, and rank 0's own flag may not be set."""
    runner, _ = pair
    runner.model.comm = SilentPeer(device)
    batches = [StepBatch(sequences=(seq([7], at, (3,)),)) for at in range(5)]
    for batch in batches[:2]:
        runner.follow_step(batch)
    runner.model.comm.flag.fill_(1)
    runner.follow_step(batches[2])
    runner._stream.synchronize()
    with pytest.raises(RankLost, match="stayed silent"):
        runner.follow_step(batches[3])
    with pytest.raises(RankLost, match="stayed silent"):
        runner.launch(batches[4]).wait()


def test_a_step_can_be_launched_before_the_tokens_of_the_last_are_known(pair):
    runner, reference = pair
    tables = [(3, 4), (8,)]
    first = StepBatch(sequences=(seq(range(15), 0, tables[0]), seq(range(9), 0, tables[1], SEEDED)))
    pending = [runner.launch(first)]
    rows, at = [0, 1], [15, 9]
    for step in range(3):
        order = [1, 0] if step % 2 == 0 else [0, 1]
        batch = StepBatch(
            sequences=tuple(
                seq([0], at[i], tables[i], SEEDED if i else GREEDY, previous=rows[i]) for i in order
            )
        )
        pending.append(runner.launch(batch))
        rows = [order.index(0), order.index(1)]
        at = [n + 1 for n in at]
    results = [p.wait().tokens for p in pending]
    tokens = list(reference.run(first).tokens)
    assert list(results[0]) == tokens
    at = [15, 9]
    for step in range(3):
        order = [1, 0] if step % 2 == 0 else [0, 1]
        batch = StepBatch(
            sequences=tuple(
                seq([tokens[i]], at[i], tables[i], SEEDED if i else GREEDY) for i in order
            )
        )
        out = reference.run(batch).tokens
        assert results[step + 1] == out
        tokens = [out[order.index(0)], out[order.index(1)]]
        at = [n + 1 for n in at]


def test_steps_outside_the_limits_are_refused_before_anything_runs(pair):
    runner, _ = pair
    for bad in (
        seq([203], 0, (1,)),
        seq([1], 16, (1,)),
        seq([1], 0, (NUM_BLOCKS,)),
        seq([1], 159 + 1, range(11)),
        seq([0], 3, (1,), previous=4),
        seq(range(129), 0, range(9)),
    ):
        with pytest.raises(Internal):
            runner.launch(StepBatch(sequences=(bad,)))


def test_all_sequences_of_a_step_may_share_a_long_prefix(device):
    """Their block tables together are longer than the pool."""
    runner = make_runner(device, tiny_config(max_position_embeddings=1600, num_hidden_layers=1))
    runner.open(100)
    runner.start()
    steps = [seq([7], 90 * 16, (*range(90), 90 + i)) for i in range(8)]
    alone = runner.run(StepBatch(sequences=tuple(steps[:1]))).tokens
    assert runner.run(StepBatch(sequences=tuple(steps))).tokens == 8 * alone


def test_the_thread_that_runs_steps_is_on_the_device_of_its_engine(device, monkeypatch):
    """With all GPUs of a host in sight, a thread is on the first one until it is told."""
    chosen = []

    def note(device):
        chosen.append((threading.current_thread().name, device))

    runner = make_runner(device, tiny_config())
    monkeypatch.setattr(torch.cuda, "set_device", note)
    third = torch.device("cuda", 2)
    monkeypatch.setattr(runner._stream, "_stream", SimpleNamespace(device=third))
    executor = Executor(runner, fingerprint=None)
    steps = threading.Thread(target=executor.enter_thread, name="steps")
    steps.start()
    steps.join()
    assert chosen == [("steps", third)]


def test_the_thread_that_runs_steps_plans_prompt_attention_for_itself(device, monkeypatch):
    """One prompt of each length; the thread that loads plans for several at once, too."""
    planned = []

    def call(self, q, k, v, *, causal):
        name = threading.current_thread().name
        planned.append((name, q.shape[0], q.shape[2], None if causal else k.shape[2]))

    monkeypatch.setattr("engine.cuda.dense.DenseAttention._call", call)
    monkeypatch.setattr("engine.cuda.memory.cudnn_serves", lambda *args: True)
    runner = make_runner(device, tiny_config(max_position_embeddings=4096))
    runner.options = replace(runner.options, max_chunk_tokens=2100)
    runner.open(2)
    monkeypatch.setattr(runner._graphs, "capture_all", lambda shapes: None)
    runner.start()
    here = threading.current_thread().name
    lengths = (1024, 1536, 2048, 2560)
    assert [entry for entry in planned if entry[3] is None] == [
        (here, 1, 1024, None),
        (here, 2, 1024, None),
        *((here, 1, length, None) for length in lengths[1:]),
    ]
    history = [(here, 1, length, 2048) for length in lengths]
    assert [entry for entry in planned if entry[3] is not None] == history
    planned.clear()
    executor = Executor(runner, fingerprint=None)
    steps = threading.Thread(target=executor.enter_thread, name="steps")
    steps.start()
    steps.join()
    assert planned == [("steps", 1, n, keys) for n in lengths for keys in (None, 2048)]


def test_graph_batches_hold_every_batch():
    assert graph_batches(1) == (1,)
    assert graph_batches(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_batches(256)[-1] == 256


def test_an_engine_opens_whose_query_heads_outnumber_the_rows_of_a_shared_tile(device):
    """66 query heads of one KV head: no tile holds a token of all of them, so none is shared."""
    config = tiny_config(num_attention_heads=66, num_key_value_heads=1)
    assert not make_runner(device, config)._memory.attention.packed
