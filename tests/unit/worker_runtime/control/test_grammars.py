"""Sequences with a grammar: what may come next, when they end, and what happens when they cannot
go on."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import pytest
from msgspec.structs import replace

from grammar.compiler import Compiler
from grammar.matcher import Matcher
from grammar.vocabulary import byte_vocabulary
from protocol.errors import ErrorCode, InvalidRequest, Unsupported
from protocol.messages import Submit
from protocol.sampling import Grammar, GrammarKind
from protocol.states import FinishReason
from tests.support.decode_bench import Bench, make_submit
from worker_runtime.control.grammars import Grammars
from worker_runtime.scheduling.messages import Submitted
from worker_runtime.scheduling.sequence import Sequence, constrain

END = 0
A, B = 1 + ord("a"), 1 + ord("b")  # bytes come behind the only special token


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_vocabulary({END: "<end>"}))


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


def submit_of(source: str, output: Ids[int] = (), **changes: Any) -> Submit:
    submit = make_submit("a", [5, 6, 7], output=tuple(output), max_tokens=9)
    chosen: dict[str, Any] = {"ignore_eos": False, "eos_token_ids": (END,), **changes}
    sampling = replace(submit.sampling, **chosen)
    return replace(submit, sampling=sampling, grammar=regex(source))


def sequence_of(compiler: Compiler, submit: Submit) -> Sequence:
    assert submit.grammar is not None
    matcher = compiler.start(submit.grammar, ends=(END,), output=submit.output_ids)
    return Sequence.from_submit(submit, 0.0, matcher)


def allowed(sequence: Sequence) -> set[int]:
    assert constrain([sequence]) == []
    step = sequence.launch(sequence.num_runnable, samples=True, row=0)
    sequence.land(len(step.tokens))
    assert step.allowed is not None
    bits = int.from_bytes(step.allowed, "little")
    return {i for i in range(257) if bits >> i & 1} - set(step.banned)


def test_a_sequence_follows_its_grammar_to_its_end(compiler: Compiler) -> None:
    sequence = sequence_of(compiler, submit_of("ab?"))
    assert not sequence.plans_ahead
    assert allowed(sequence) == {A}
    assert sequence.append(A) is None
    assert allowed(sequence) == {B, END}
    assert sequence.append(B) is None
    assert allowed(sequence) == {END}
    assert sequence.append(END) is FinishReason.STOP


def test_one_that_is_taken_up_elsewhere_goes_on_where_it_was(compiler: Compiler) -> None:
    sequence = sequence_of(compiler, submit_of("ab?", output=[A]))
    assert allowed(sequence) == {B, END}


def test_min_tokens_hold_back_an_end_only_while_something_else_is_left(compiler: Compiler) -> None:
    sequence = sequence_of(compiler, submit_of("a{1,2}", min_tokens=5))
    sequence.append(A)
    assert allowed(sequence) == {A}
    sequence.append(A)
    assert allowed(sequence) == {END}
    assert sequence.append(END) is FinishReason.STOP


def test_a_grammar_that_cannot_go_on_fails_its_own_request_alone(compiler: Compiler) -> None:
    """The engine of this bench pays no heed to masks, so what it samples leaves the grammar."""
    bench = Bench()
    good = bench.submit(make_submit("good", [1, 2, 3], max_tokens=6))
    bad = submit_of("aaaa")
    assert bad.grammar is not None
    matcher = compiler.start(bad.grammar, ends=(END,))
    bench.tell(Submitted(submit=bad, matcher=matcher))
    bench.finish()
    assert len(bench.output(good)) == 6
    assert [failure.key for failure in bench.failures] == [bad.key]
    assert bench.failures[0].error.code is ErrorCode.INVALID_REQUEST
    assert not bench.failures[0].retriable
    assert bench.idle()


async def test_grammars_are_refused_where_they_cannot_be_served(compiler: Compiler) -> None:
    served, without = Grammars(compiler), Grammars(None)
    assert isinstance(await served.matcher(submit_of("a")), Matcher)
    with pytest.raises(Unsupported):
        await without.matcher(submit_of("a"))
    for wrong in (submit_of("("), submit_of("a", output=[B]), submit_of("a", ignore_eos=True)):
        with pytest.raises(InvalidRequest) as caught:
            await served.matcher(wrong)
        assert caught.value.param == "grammar"  # the router knows the client's name for it
    served.close()
    without.close()
