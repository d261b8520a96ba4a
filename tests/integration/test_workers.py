"""Prefill and decode workers with a real hand-off over TCP, against transformers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.executor import Executor, PendingStep
from protocol.errors import ErrorCode, InvalidRequest, Unavailable
from protocol.ids import RequestKey
from protocol.messages import Submit
from protocol.sampling import SamplingParams
from protocol.states import FinishReason, WorkerState
from protocol.timeline import Phase
from rpc.methods import SUBMIT
from tests.support.held import Held
from tests.support.local_engine import LocalEngine
from tests.support.pair import SMALL_STEPS, Brake, Pair, running_pair
from tests.support.prompts import random_ids
from tests.support.tiny import Oracle
from worker_runtime.scheduling import messages
from worker_runtime.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHUNK = SMALL_STEPS.max_num_batched_tokens


@pytest.mark.parametrize("local", [False, True], ids=["handed over", "prefilled on decode"])
async def test_greedy_ids_equal_transformers_at_every_kind_of_length(
    pair: Pair, oracle: Oracle, local: bool
) -> None:
    lengths = [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
    for length in lengths:
        prompt = random_ids(length)
        answer = await pair.generate(prompt, GREEDY, local=local)
        assert answer.ids() == oracle.greedy(prompt, 12), length
        assert answer.finish is FinishReason.LENGTH
        assert sorted(answer.tokens) == list(range(12))
    await pair.idle()


async def test_a_worker_is_ready_once_the_thread_of_its_steps_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def enter(_: Executor) -> None:
        loop.call_soon_threadsafe(entered.set)
        assert may_go_on.wait(60)

    monkeypatch.setattr(Executor, "enter_thread", enter)
    worker = Worker(pair.decodes[0].settings)
    starting = asyncio.create_task(worker.start())
    await entered.wait()
    assert worker.status().state is WorkerState.STARTING
    assert not starting.done()
    may_go_on.set()
    await starting
    assert worker.status().state is WorkerState.READY
    await worker.stop()


async def test_requests_at_once_do_not_mix(pair: Pair, oracle: Oracle) -> None:
    prompts = [random_ids(5 + 9 * i, seed=i) for i in range(12)]
    answers = await asyncio.gather(
        *(pair.generate(p, GREEDY, local=i % 4 == 3) for i, p in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == oracle.greedy(prompt, 12)
    await pair.idle()


async def test_a_peer_without_a_ticket_is_refused_and_holds_nothing(pair: Pair) -> None:
    submit = Submit(
        key=RequestKey("no-ticket"),
        router_id=pair.router.router_id,
        prompt_ids=(1, 2, 3),
        sampling=GREEDY,
        time_left_s=60.0,
        peer=pair.prefill_refs[0],
    )
    with pytest.raises(InvalidRequest) as caught:
        await pair.router.pool.get(pair.decode_refs[0].address).call(SUBMIT, submit, timeout_s=60)
    assert caught.value.param == "ticket"
    await pair.idle()


async def test_a_hand_off_that_cannot_go_on_harms_no_other(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = pair.prefills[0].transfers.handoffs.sender
    push = sender.push
    broken: set[RequestKey] = set()

    def failing_push(key: RequestKey, *args: object, **kwargs: object) -> None:
        if not broken or key in broken:
            broken.add(key)
            raise ValueError("no such block")
        push(key, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(sender, "push", failing_push)
    prompts = [random_ids(20, seed=i) for i in range(4)]
    answers = await asyncio.gather(*(pair.generate(prompt, GREEDY) for prompt in prompts))
    failed = [answer for answer in answers if answer.failures]
    assert [f.failures[0].error.code for f in failed] == [ErrorCode.INTERNAL]
    assert failed[0].failures[0].retriable
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer in failed or answer.ids() == oracle.greedy(prompt, 12)
    await pair.idle()


async def test_a_first_token_that_is_none_fails_its_request_alone(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker whose GPU goes wrong must not end its decode workers."""
    sender = pair.prefills[0].transfers.handoffs.sender
    prompt = random_ids(40)
    with monkeypatch.context() as wrong:
        commit = sender.commit
        wrong.setattr(sender, "commit", lambda key, _tokens, **how: commit(key, (-1,), **how))
        answer = await pair.generate(prompt, GREEDY)
    assert [failure.error.code for failure in answer.failures] == [ErrorCode.INTERNAL]
    assert answer.failures[0].retriable
    await pair.idle()
    assert (await pair.generate(prompt, GREEDY)).ids() == oracle.greedy(prompt, 12)
    await pair.idle()


async def test_sampled_ids_do_not_depend_on_the_path(pair: Pair, model: str) -> None:
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=42, max_tokens=16, ignore_eos=True
    )
    prompt = random_ids(40)
    local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))
    expected = local.generate([(prompt, params)])[0]
    alone = await pair.generate(prompt, params)
    on_decode = await pair.generate(prompt, params, local=True)
    others = [pair.generate(random_ids(20 + i, seed=i), GREEDY) for i in range(7)]
    crowd = await asyncio.gather(pair.generate(prompt, params), *others)
    assert alone.ids() == on_decode.ids() == crowd[0].ids() == expected
    different = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=43, max_tokens=16, ignore_eos=True
    )
    assert (await pair.generate(prompt, different)).ids() != expected


async def test_preemption_changes_nothing(model: str, oracle: Oracle) -> None:
    async with running_pair(
        model, decode_blocks=12, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS
    ) as pair:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
        prompts = [random_ids(20, seed=i) for i in range(5)]
        asked = (pair.generate(p, seeded if i == 0 else params) for i, p in enumerate(prompts))
        answers = await pair.at_once(asked, running=3)
        assert pair.decodes[0].status().counters[messages.PREEMPTIONS] > 0
        for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
            assert answer.ids() == oracle.greedy(prompt, 60)
        local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))
        assert answers[0].ids() == local.generate([(prompts[0], seeded)])[0]
        await pair.idle()


async def test_penalties_survive_the_hand_over_preemption_and_resumption(model: str) -> None:
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=60,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        logit_bias=((7, -100.0), (9, 3.0)),
    )
    prompts = [random_ids(20, seed=i) for i in range(5)]
    local = LocalEngine(EngineConfig(model_path=model, dtype="float32", num_blocks=64))
    expected = local.generate([(prompt, params) for prompt in prompts])
    without = replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    assert local.generate([(prompts[0], without)])[0] != expected[0]
    async with running_pair(
        model, decode_blocks=12, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS
    ) as pair:
        asked = (pair.generate(p, params, local=i == 4) for i, p in enumerate(prompts))
        answers = await pair.at_once(asked, running=3)
        assert pair.decodes[0].status().counters[messages.PREEMPTIONS] > 0
        assert [answer.ids() for answer in answers] == expected
        refs = pair.decode_refs[0], pair.prefill_refs[0]
        key = await pair.router.submit(
            prompts[0], params, *refs, output=expected[0][:25], attempt=1
        )
        assert (await pair.router.answer(key)).ids() == expected[0][25:]
        await pair.idle()


async def test_request_that_ends_at_token_one_never_reaches_decode(
    pair: Pair, oracle: Oracle
) -> None:
    prompt = random_ids(20)
    first = oracle.greedy(prompt, 1)[0]
    steps = pair.decodes[0].status().steps
    one = SamplingParams(temperature=0.0, max_tokens=1)
    stop = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(first,))
    ended = SamplingParams(temperature=0.0, max_tokens=9, eos_token_ids=(first,))
    for params, reason in ((one, "length"), (stop, "stop"), (ended, "stop")):
        answer = await pair.generate(prompt, params)
        assert (answer.ids(), answer.finish) == ([first], FinishReason(reason))
        await pair.idle()
    assert pair.decodes[0].status().steps == steps


async def test_resumed_request_continues_without_repeating(pair: Pair, oracle: Oracle) -> None:
    prompt = random_ids(20)
    whole = oracle.greedy(prompt, 12)
    key = await pair.router.submit(
        prompt, GREEDY, pair.decode_refs[0], pair.prefill_refs[0], output=whole[:5], attempt=1
    )
    answer = await pair.router.answer(key)
    assert sorted(answer.tokens) == list(range(5, 12))
    assert answer.ids() == whole[5:]


async def test_timeline_covers_both_workers(pair: Pair) -> None:
    answer = await pair.settled(await pair.generate(random_ids(70), GREEDY))
    spans = {(span.place, span.phase): span for span in answer.spans}
    assert spans["prefill-0", Phase.PREFILL].counts == {
        "tokens": 70,
        "chunks": 3,
        "cached_tokens": 0,
    }
    transfer = spans["prefill-0", Phase.TRANSFER]
    layers, kv_heads, head_dim = 2, 2, 16
    blocks = -(-70 // 16)
    assert transfer.counts["bytes"] == blocks * 16 * layers * 2 * kv_heads * head_dim * 4
    assert spans["decode-0", Phase.DECODE].counts["steps"] == 11


async def test_cancel_in_any_phase_returns_every_block(pair: Pair) -> None:
    rng = random.Random(7)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(30):
        prompt = random_ids(rng.choice([3, 40, 120]), seed=i)
        local = rng.random() < 0.3
        prefill = None if local else pair.prefill_refs[0]
        key = await pair.router.submit(prompt, long, pair.decode_refs[0], prefill)
        await asyncio.sleep(rng.random() * 0.06)
        await pair.router.cancel(key, *pair.decode_refs, *pair.prefill_refs)
    await pair.idle()


async def test_router_that_leaves_frees_its_requests(pair: Pair) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(4):
        await pair.router.submit(
            random_ids(40, seed=i), long, pair.decode_refs[0], pair.prefill_refs[0]
        )
    await pair.router.close()
    await pair.idle()


async def test_bad_requests_are_refused_by_name_and_harm_no_other(
    pair: Pair, oracle: Oracle
) -> None:
    running = asyncio.create_task(pair.generate(random_ids(30), GREEDY))
    for prompt, params, name in (
        ([], GREEDY, "prompt"),
        ([128], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([1], SamplingParams(max_tokens=5000), "max_tokens"),
        ([1], SamplingParams(temperature=-1.0), "Submit.sampling.temperature"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await pair.router.submit(prompt, params, pair.decode_refs[0], None)
        assert caught.value.param == name
    assert (await running).ids() == oracle.greedy(random_ids(30), 12)


async def test_ticket_of_a_stranger_is_refused(pair: Pair) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.pair.SECRET", b"wrong")
        with pytest.raises(Exception, match="signature") as caught:
            await pair.router.submit([1, 2], GREEDY, pair.decode_refs[0], pair.prefill_refs[0])
    assert caught.value.code is ErrorCode.STALE_MESSAGE
    await pair.idle()


async def test_deadline_is_a_typed_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the time is another one."""
    ahead_s = -86_400.0
    monkeypatch.setattr(pair.decodes[0]._loop, "_clock", lambda: time.time() + ahead_s)
    brake = Brake(pair.decodes[0], 20)
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    key = await pair.router.submit(
        random_ids(40), long, pair.decode_refs[0], pair.prefill_refs[0], timeout_s=600.0
    )
    while len(pair.router.answers[key].tokens) < 3:
        await asyncio.sleep(0.005)
    ahead_s += 601.0
    brake.release()
    answer = await pair.router.answer(key)
    assert answer.failures[0].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert not answer.failures[0].retriable
    await pair.idle()


async def test_machines_need_not_agree_on_the_time(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker, ahead_s in ((pair.prefills[0], 86_400.0), (pair.decodes[0], -86_400.0)):
        for part in (worker._loop, worker.control):
            monkeypatch.setattr(part, "_clock", lambda ahead_s=ahead_s: time.time() + ahead_s)
    prompt = random_ids(40)
    assert (await pair.generate(prompt, GREEDY)).ids() == oracle.greedy(prompt, 12)
    await pair.idle()


async def test_draining_worker_finishes_what_it_has_and_refuses_more(
    pair: Pair, oracle: Oracle
) -> None:
    prompt = random_ids(30)
    long = replace(GREEDY, max_tokens=60)
    running = await pair.router.submit(prompt, long, pair.decode_refs[0], pair.prefill_refs[0])
    drained = [await pair.prefills[0].drain(60), await pair.decodes[0].drain(60)]
    assert drained == [True, True]
    assert (await pair.router.answer(running)).ids() == oracle.greedy(prompt, 60)
    with pytest.raises(Unavailable):
        await pair.router.submit(prompt, GREEDY, pair.decode_refs[0], None)


def hold_second_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Held:
    """The second step that the worker launches from now on waits to be released."""
    held, launch, launched = Held(), worker.ranks.executor.launch, []

    def hold(batch: StepBatch) -> PendingStep:
        launched.append(batch)
        if len(launched) == 2:
            held()
        return launch(batch)

    monkeypatch.setattr(worker.ranks.executor, "launch", hold)
    return held


async def test_loss_of_prefill_fails_its_requests_as_retriable(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(model, prefill_config=SMALL_STEPS, decode_config=SMALL_STEPS) as pair:
        held = hold_second_step(pair.prefills[0], monkeypatch)
        long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        key = await pair.router.submit(
            random_ids(400), long, pair.decode_refs[0], pair.prefill_refs[0]
        )
        assert await asyncio.to_thread(held.begun)
        stopping = asyncio.create_task(pair.prefills[0].stop())
        while not pair.prefills[0].inbox.closed:
            await asyncio.sleep(0)
        held.release()
        await stopping
        answer = await pair.router.answer(key)
        assert answer.failures[0].retriable
        pair.prefills.clear()
        await pair.idle()


@pytest.mark.parametrize("informed", ["prefill", "decode"])
async def test_peers_that_left_the_cluster_lose_their_handoffs_at_once(
    pair: Pair, oracle: Oracle, informed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side may live on: it does no harm, and later hand-offs go through."""
    held = hold_second_step(pair.prefills[0], monkeypatch)
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    key = await pair.router.submit(random_ids(400), long, pair.decode_refs[0], pair.prefill_refs[0])
    assert await asyncio.to_thread(held.begun)
    if informed == "prefill":
        pair.prefills[0].peers_left(frozenset({pair.decode_refs[0].epoch}))
    else:
        pair.decodes[0].peers_left(frozenset({pair.prefill_refs[0].epoch}))
    if informed == "prefill":
        held.release()  # its step thread tells
    answer = await pair.router.answer(key, timeout_s=40)  # while prefill's step is held
    held.release()
    assert answer.failures[0].retriable
    assert answer.failures[0].error.code is ErrorCode.HANDOFF_FAILED
    await pair.router.cancel(key, *pair.decode_refs, *pair.prefill_refs)
    await pair.idle()
    prompt = random_ids(30)
    assert (await pair.generate(prompt, GREEDY)).ids() == oracle.greedy(prompt, 12)


def test_model_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"config\.json"):
        LocalEngine(EngineConfig(model_path=str(tmp_path / "absent")))
