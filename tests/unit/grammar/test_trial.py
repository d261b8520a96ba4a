"""A grammar that the library cannot take is refused, and harms nothing but a process of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from grammar.compiler import Compiler
from grammar.trial import Trial
from protocol.errors import InvalidRequest, Unavailable
from protocol.sampling import Grammar, GrammarKind

SPECIAL = {0: "<|endoftext|>", 300: "[CALL]"}


def schema(value: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(value))


def lark(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, source=source)


def chain(length: int) -> dict[str, object]:
    """Definitions that refer to the next, one level deep each."""
    arrays = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**arrays, f"a{length}": {"type": "integer"}}}


GOOD = [
    schema(chain(60)),
    schema({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 100}}}),
    lark('start: <[300]> "a" <|endoftext|>'),
    Grammar(kind=GrammarKind.REGEX, source="(a|b)*a(a|b){40}c"),
    Grammar(kind=GrammarKind.CHOICE, source='["yes", "\\ud83d\\ude42"]'),
]
COSTLY = {
    "a deep chain of definitions": schema(chain(4000)),
    "a deep chain of rules": lark(
        "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(8000)) + 'r8000: "c"'
    ),
    "a deep chain of terminals": lark(
        "start: T0\n" + "".join(f'T{i}: "a" T{i + 1} | "b"\n' for i in range(8000)) + 'T8000: "c"'
    ),
    "a divisor of many states": schema({"type": "integer", "multipleOf": 999_983}),
    "the same inside a grammar": lark('start: %json {"type": "integer", "multipleOf": 99999989}'),
    "thousands of optional properties": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    ),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is late because the machine is busy."""
    monkeypatch.setattr("grammar.trial._WALL_S", 200.0)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial(SPECIAL, cpu_s=4.0)
    yield trial
    trial.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Trial]:
    trial = Trial(SPECIAL, cpu_s=0.4)
    yield trial
    trial.close()


@pytest.mark.parametrize("grammar", GOOD, ids=lambda grammar: grammar.source[:30])
def test_a_good_grammar_passes(trial: Trial, grammar: Grammar) -> None:
    trial.check(grammar)


def test_a_wrong_one_is_refused_in_the_compilers_words(trial: Trial) -> None:
    with pytest.raises(InvalidRequest, match="no text has this form"):
        trial.check(schema({"$ref": "#"}))
    with pytest.raises(InvalidRequest, match="at most 262144 characters"):
        trial.check(lark("#" * 300_000))


@pytest.mark.parametrize("grammar", COSTLY.values(), ids=COSTLY)
def test_what_costs_too_much_is_refused_and_the_next_one_is_served(
    hasty: Trial, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiler, "start", None)  # nothing is compiled in this process
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequest, match="to compile"):
            hasty.check(grammar)
    hasty.check(Grammar(kind=GrammarKind.REGEX, source=f"next{len(grammar.source)}"))


def test_a_process_that_is_gone_is_replaced() -> None:
    trial = Trial(SPECIAL)
    trial.check(lark('start: "a"'))
    first = trial._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    trial.check(lark('start: "b"'))
    second = trial._process
    assert second is not None
    trial.close()
    assert second.returncode is not None
    trial.close()


def test_a_process_that_got_no_time_says_nothing_about_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial, good = Trial(SPECIAL), lark('start: "a"')
    trial.begin()
    frozen = trial._process
    assert frozen is not None
    os.kill(frozen.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("grammar.trial._WALL_S", 0.05)
        with pytest.raises(Unavailable, match=r"could not be tried within 0\.05 s"):
            trial.check(good)
    assert not trial.known(good)
    trial.check(good)
    assert trial.known(good)
    assert frozen.returncode == -signal.SIGKILL
    trial.close()


def test_what_is_too_wide_behind_its_first_character_is_refused(trial: Trial) -> None:
    """Workers would find out only once the output has begun."""
    wide = {f"p{i}": {"type": "string"} for i in range(1000)}
    with pytest.raises(InvalidRequest, match="items; max is 2000"):
        trial.check(schema({"type": "object", "properties": wide}))
    trial.check(schema({"type": "object", "properties": wide, "required": list(wide)}))


def test_what_is_known_is_told_while_another_one_is_tried(trial: Trial) -> None:
    good, bad = lark('start: "known"'), lark("start: unknown")
    for grammar in (good, bad):
        assert not trial.known(grammar)
    trial.check(good)
    with pytest.raises(InvalidRequest):
        trial.check(bad)
    trial._ask = None  # type: ignore[method-assign, assignment]
    assert trial.known(good)
    with pytest.raises(InvalidRequest):
        trial.known(bad)
    del trial._ask
