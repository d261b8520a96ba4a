"""What a router knows of prefix caches, from the workers' words to the choice and to the usage."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from observability import metrics
from protocol.ids import RequestKey, Role
from protocol.kv_layout import (
    HINT_BYTES,
    CacheChange,
    KVFingerprint,
    chain_seed,
    extend_chain,
    hints,
    split_hints,
)
from protocol.wire import inference_pb2 as pb
from router.workers.bookkeeping import PrefixView, PromptBlocks
from tests.support.blocks import FINGERPRINT
from tests.support.router_front_ends import MakeFrontEnds, until
from tests.support.stub_workers import StubFleet, StubWorker

PROMPT = [30 + i for i in range(40)]  # two full blocks and a half


def blocks_of(tokens: list[int], salt: str = "", block_size: int = 16) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, tokens, block_size=block_size, seed=chain_seed(FINGERPRINT, salt))
    return digests


def holds(tokens: list[int], salt: str = "") -> CacheChange:
    return CacheChange(added=hints(blocks_of(tokens, salt)))


# --- views ----------------------------------------------------------------------------------------


def test_a_prompt_has_the_hints_that_workers_tell() -> None:
    told = split_hints(hints(blocks_of(PROMPT)))
    assert PromptBlocks(PROMPT).hints(FINGERPRINT, 16) == told
    assert PromptBlocks(PROMPT, "s").hints(FINGERPRINT, 16) != PromptBlocks(PROMPT).hints(
        FINGERPRINT, 16
    )


def test_a_prompt_is_hashed_for_each_size_of_block() -> None:
    prompt = PromptBlocks(PROMPT)
    for size in (8, 16, 32):
        told = hints(blocks_of(PROMPT, block_size=size))
        assert prompt.hints(FINGERPRINT, size) == split_hints(told)
        assert len(told) == len(PROMPT) // size * HINT_BYTES


def test_a_view_follows_what_is_told() -> None:
    view, prompt = PrefixView(), PromptBlocks(list(range(64))).hints(FINGERPRINT, 16)
    told = [number.to_bytes(HINT_BYTES, "little") for number in prompt]
    assert not view.reports
    view.take(CacheChange(reset=True, added=b"".join(told[:3])))
    assert (view.reports, view.num_held(prompt)) == (True, 3)
    view.take(CacheChange(removed=told[2]))
    assert view.num_held(prompt) == 2
    view.take(CacheChange(removed=told[0], added=told[0]))  # gone and back
    assert view.num_held(prompt) == 2
    view.take(CacheChange(reset=True, added=told[0]))
    assert view.num_held(prompt) == 1
    view.forget()
    assert (view.reports, view.num_held(prompt)) == (False, 0)


def test_what_requests_bring_is_expected_until_they_end() -> None:
    view, prompt = PrefixView(), PromptBlocks(list(range(64))).hints(FINGERPRINT, 16)
    view.take(CacheChange(reset=True, added=prompt[0].to_bytes(HINT_BYTES, "little")))
    first, second = RequestKey("a"), RequestKey("b")
    view.expect(first, prompt[:3])
    view.expect(second, prompt)
    assert (view.num_held(prompt), view.num_expected(prompt)) == (1, 4)
    view.release(second)
    assert view.num_expected(prompt) == 3
    view.release(first)
    view.release(first)
    assert view.num_expected(prompt) == 1


# --- through the front ends -----------------------------------------------------------------------


async def two_decodes(fleet: StubFleet) -> tuple[StubWorker, StubWorker, StubWorker]:
    prefill = await fleet.add(Role.PREFILL)
    return prefill, await fleet.add(Role.DECODE), await fleet.add(Role.DECODE)


async def test_requests_go_where_their_prefix_is(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    _, first, second = await two_decodes(fleet)
    settings = {"prefix_tokens_per_sequence": 8, "local_prefill_tokens": 8}
    async with make_front_ends(fleet, **settings) as front_ends:
        await front_ends.wait_ready(2, 1)
        members = {m.ref.worker_id: m for m in front_ends.router._workers.all()}
        second.tell_cache(holds(PROMPT[:32]))
        await until(lambda: members[second.name].prefix.reports)
        body = {"prompt": PROMPT, "max_tokens": 4, "timeline": True}
        for _ in range(6):
            status, answer = await front_ends.post("/v1/completions", body)
            assert status == 200
        assert (len(first.submitted), len(second.submitted)) == (0, 6)
        # 8 of the 40 tokens are not cached: fewer than go through prefill
        assert {s.peer for s in second.submitted} == {None}
        assert front_ends.router.metrics.value(
            metrics.PAIR_CHOICES, decode="prefix", prefill="prefix_cached"
        ) == len(second.submitted)
        (route,) = [s for s in answer["timeline"]["spans"] if s["phase"] == "route"]
        assert route["note"].startswith("local: prefix_cached; decode prefix: 32 tokens cached")
        # another salt shares nothing
        await front_ends.post("/v1/completions", body | {"cache_salt": "mine"})
        (salted,) = [s for w in (first, second) for s in w.submitted if s.cache_salt]
        assert salted.cache_salt == "mine"
        assert salted.peer is not None


async def test_prefill_learns_which_worker_has_more_of_a_prompt(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    prefill, holder = await fleet.add(Role.PREFILL), await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, local_prefill_tokens=8) as front_ends:
        await front_ends.wait_ready(1, 1)
        members = {m.ref.worker_id: m for m in front_ends.router._workers.all()}
        prompt = list(range(1, 201))
        holder.tell_cache(holds(prompt[:96]))
        prefill.tell_cache(holds(prompt[:16]))
        await until(lambda: all(member.prefix.reports for member in members.values()))
        for body in ({}, {"cache_salt": "other"}):
            status, _ = await front_ends.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 4, **body}
            )
            assert status == 200
        first, second = prefill.submitted
        assert [s.source for s in (second, *holder.submitted)] == [None] * 3
        assert (first.source.worker, first.source.num_tokens) == (holder.ref, 96)
        ticket = first.source.ticket
        ticket.verify(fleet.secret)
        assert (ticket.key, ticket.num_blocks) == (first.key.loan, 6)
        assert (ticket.sender_epoch, ticket.receiver_epoch) == (holder.ref.epoch, prefill.ref.epoch)


async def test_a_worker_that_comes_back_has_an_empty_cache(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    _, first, _ = await two_decodes(fleet)
    async with make_front_ends(fleet) as front_ends:
        await front_ends.wait_ready(2, 1)
        first.tell_cache(holds(PROMPT))
        (member,) = [m for m in front_ends.router._workers.all() if m.ref == first.ref]
        await until(lambda: member.prefix.reports)
        blocks = PromptBlocks(PROMPT).hints(FINGERPRINT, 16)
        assert member.prefix.num_held(blocks) == 2
        first.break_streams()
        await until(lambda: not member.prefix.reports)
        assert member.prefix.num_held(blocks) == 0


async def test_usage_tells_what_was_cached_on_both_front_ends(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.PREFILL, cached_tokens=32)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": PROMPT, "max_tokens": 4}
        _, answer = await front_ends.post("/v1/completions", body)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        _, answer = await front_ends.post("/v1/completions", body | {"prompt": [PROMPT, PROMPT]})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
        _, answer = await front_ends.post("/v1/completions", body | {"n": 3})
        assert answer["usage"]["prompt_tokens"] == 40
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=2)
        request.cache_salt = "mine"
        messages = [message async for message in front_ends.inference.Generate(request)]
        assert messages[-1].usage.prompt_tokens_details.cached_tokens == 32


async def test_clients_say_how_long_a_conversation_may_pause(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    decode = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": PROMPT, "max_tokens": 4}
        for keep_s in (None, 90, 0):
            said = {} if keep_s is None else {"cache_keep_s": keep_s}
            status, _ = await front_ends.post("/v1/completions", body | said)
            assert status == 200
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=2)
        request.cache_keep_s = 30
        assert [message async for message in front_ends.inference.Generate(request)]
        status, answer = await front_ends.post("/v1/completions", body | {"cache_keep_s": 1e9})
        assert (status, answer["error"]["param"]) == (400, "cache_keep_s")
    assert [submit.keep_s for submit in decode.submitted] == [0, 90, 0, 30]


_MARK, _LONG_MARK = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
_HI: dict[str, Any] = {"type": "text", "text": "hi"}
_TURN: dict[str, Any] = {"role": "user", "content": [_HI]}
PAUSES: list[tuple[str, dict[str, Any], float]] = [
    ("messages", {}, 0),
    ("messages", {"cache_control": _MARK}, 300),
    ("messages", {"system": [{**_HI, "cache_control": _MARK}]}, 300),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{**_HI, "cache_control": _MARK}]}]},
        300,
    ),
    ("messages", {"cache_control": _MARK, "system": [{**_HI, "cache_control": _LONG_MARK}]}, 3600),
    ("chat/completions", {"prompt_cache_retention": "24h"}, 86400),
    ("chat/completions", {"prompt_cache_retention": "24h", "cache_keep_s": 9}, 9),
    ("chat/completions", {"prompt_cache_retention": "in_memory"}, 0),
    ("responses", {"prompt_cache_retention": "24h"}, 86400),
]


async def test_other_apis_say_it_in_their_words(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    decode = await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        for path, fields, _ in PAUSES:
            body = {"max_tokens": 2, "messages": [_TURN]}
            if path == "responses":
                body = {"input": "hi", "max_output_tokens": 2}
            status, answer = await front_ends.post(f"/v1/{path}", body | fields)
            assert status == 200, answer
        odd = {"max_tokens": 2, "messages": [_TURN], "cache_control": {"ttl": "2h"}}
        status, answer = await front_ends.post("/v1/messages", odd)
        assert (status, answer["error"]["param"]) == (400, "cache_control.ttl")
    assert [submit.keep_s for submit in decode.submitted] == [keep_s for *_, keep_s in PAUSES]


async def test_a_worker_that_says_nothing_counts_as_having_computed_all(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        _, answer = await front_ends.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_choices_of_a_request_gather_where_the_first_one_went(
    fleet: StubFleet, make_front_ends: MakeFrontEnds
) -> None:
    _, first, second = await two_decodes(fleet)
    async with make_front_ends(fleet, prefix_tokens_per_sequence=8) as front_ends:
        await front_ends.wait_ready(2, 1)
        for worker in (first, second):
            worker.tell_cache(CacheChange(reset=True))
        await until(
            lambda: all(m.prefix.reports for m in front_ends.router._workers.ready(Role.DECODE))
        )
        await front_ends.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "n": 4})
        assert sorted((len(first.submitted), len(second.submitted))) == [0, 4]
        assert all(s.peer is not None for s in (*first.submitted, *second.submitted))
        members = front_ends.router._workers.all()
        await until(lambda: all(not m.prefix._expected for m in members))


async def test_long_prompts_are_hashed_off_the_event_loop(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fleet.add(Role.DECODE)
    hashed_in = []
    original = PromptBlocks.hints

    def hints_noted(self: PromptBlocks, fingerprint: KVFingerprint, size: int) -> list[bytes]:
        if not self._hints:
            hashed_in.append(threading.current_thread() is threading.main_thread())
        return original(self, fingerprint, size)

    monkeypatch.setattr(PromptBlocks, "hints", hints_noted)
    monkeypatch.setattr("router.dispatch.dispatcher._HASHED_INLINE", 100)
    async with make_front_ends(fleet) as front_ends:
        worker.tell_cache(CacheChange(reset=True))
        (member,) = front_ends.router._workers.all()
        await until(lambda: member.prefix.reports)
        await front_ends.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        await front_ends.post("/v1/completions", {"prompt": PROMPT * 3, "max_tokens": 1})
    assert hashed_in == [True, False]


@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
async def test_a_wrong_salt_is_refused_by_name(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, salt: object
) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
        status, answer = await front_ends.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "cache_salt")
