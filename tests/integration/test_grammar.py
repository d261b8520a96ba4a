"""Structured output through real workers: always valid, and the same ids whatever the path."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.config import EngineConfig
from grammar.compiler import Compiler
from grammar.vocabulary import load_vocabulary
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from protocol.states import FinishReason
from tests.support.local_engine import LocalEngine
from tests.support.pair import Pair, running_pair
from tests.support.tiny import save_tiny_llama
from worker_runtime.config import WorkerConfig
from worker_runtime.scheduling import messages

VOCAB = 49_152
ENDS = (0, 2)
CONFIG = WorkerConfig(max_num_seqs=24, max_num_batched_tokens=64)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 40_000_000},
        "rivers": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "size", "people", "rivers"],
    "additionalProperties": False,
}
JSON = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
REGEX = Grammar(kind=GrammarKind.REGEX, source=r"(\d{1,3}\.){3}\d{1,3}")
CHOICE = Grammar(kind=GrammarKind.CHOICE, source='["yes", "no, never", "été 🙂"]')
SAMPLED = SamplingParams(temperature=1.0, max_tokens=200, eos_token_ids=ENDS)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model behind the real tokenizer: close to random logits."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path, vocab_size=VOCAB)
    (path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    return str(path)


@pytest.fixture
async def pair(tiny: str) -> AsyncIterator[Pair]:
    async with running_pair(tiny, prefill_config=CONFIG, decode_config=CONFIG) as pair:
        yield pair


def check(grammar: Grammar, text: str) -> None:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), SCHEMA)
        case GrammarKind.REGEX:
            assert re.fullmatch(grammar.source, text, re.ASCII), text
        case _:
            assert text in json.loads(grammar.source)


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return [1000 + 37 * seed + i for i in range(length)]


async def test_ids_do_not_depend_on_the_path(pair: Pair, tiny: str, tokenizer: Tokenizer) -> None:
    """Alone, in a batch, handed over or prefilled on decode, resumed: the ids of the local engine
    under masks that are computed anew for every token."""
    vocabulary = load_vocabulary(Path(tiny), VOCAB)
    assert vocabulary is not None
    compiler = Compiler(vocabulary)
    asked = [
        (prompt_of(i), replace(SAMPLED, seed=i, temperature=float(i % 3 > 0)), grammar)
        for i, grammar in enumerate([JSON, REGEX, CHOICE, JSON, JSON, CHOICE])
    ]
    masks = [
        lambda output, grammar=grammar: compiler.start(grammar, ends=ENDS, output=output).mask
        for _, _, grammar in asked
    ]
    local = LocalEngine(EngineConfig(model_path=tiny, dtype="float32", num_blocks=256))
    expected = local.generate([(prompt, params) for prompt, params, _ in asked], masks)
    plain = SamplingParams(temperature=1.0, seed=9, max_tokens=30, ignore_eos=True)
    together, *crowd = await asyncio.gather(
        asyncio.gather(
            *(pair.generate(p, s, grammar=g, local=i % 2 == 1) for i, (p, s, g) in enumerate(asked))
        ),
        *(pair.generate(prompt_of(50 + i), plain) for i in range(4)),
    )
    for (prompt, params, grammar), answer, ids in zip(asked, together, expected, strict=True):
        assert answer.ids() == ids
        assert answer.finish is FinishReason.STOP
        check(grammar, tokenizer.decode(ids[:-1], skip_special_tokens=False))
        for known in {1, len(ids) // 2, len(ids) - 1} - {0, len(ids)}:
            resumed = await pair.generate(prompt, params, grammar=grammar, output=ids[:known])
            assert resumed.ids() == ids[known:]
    assert crowd[0].ids() == (await pair.generate(prompt_of(50), plain)).ids()
    await pair.idle()


async def test_preemption_changes_nothing(tiny: str, tokenizer: Tokenizer) -> None:
    asked = [(prompt_of(i), replace(SAMPLED, seed=i)) for i in range(6)]
    async with running_pair(tiny, prefill_config=CONFIG, decode_config=CONFIG) as roomy:
        alone = [await roomy.generate(p, s, grammar=JSON) for p, s in asked]
    async with running_pair(
        tiny, decode_blocks=16, prefill_config=CONFIG, decode_config=CONFIG
    ) as tight:
        calls = (tight.generate(p, s, grammar=JSON) for p, s in asked)
        answers = await tight.at_once(calls, running=6)
        assert tight.decodes[0].status().counters[messages.PREEMPTIONS] > 0
        for answer, other in zip(answers, alone, strict=True):
            assert answer.ids() == other.ids()
            check(JSON, tokenizer.decode(answer.ids()[:-1], skip_special_tokens=False))
        await tight.idle()


async def test_min_tokens_max_tokens_and_stop_tokens_beside_a_grammar(
    pair: Pair, tokenizer: Tokenizer
) -> None:
    letters = Grammar(kind=GrammarKind.REGEX, source="a+")
    long = replace(SAMPLED, seed=1, min_tokens=12, max_tokens=60)
    answer = await pair.generate(prompt_of(1), long, grammar=letters)
    assert len(answer.ids()) > 12
    assert not set(answer.ids()[:12]) & set(ENDS)
    # where the grammar must end, it does, however few tokens that were
    short = await pair.generate(prompt_of(1), long, grammar=CHOICE)
    assert short.finish is FinishReason.STOP
    assert len(short.ids()) < 12
    check(CHOICE, tokenizer.decode(short.ids()[:-1]))
    cut = await pair.generate(prompt_of(2), replace(SAMPLED, max_tokens=3), grammar=JSON)
    assert (len(cut.ids()), cut.finish) == (3, FinishReason.LENGTH)
    stopped = await pair.generate(
        prompt_of(2), replace(SAMPLED, stop_token_ids=(cut.ids()[1],)), grammar=JSON
    )
    assert (stopped.ids(), stopped.finish) == (cut.ids()[:2], FinishReason.STOP)
    await pair.idle()


async def test_what_cannot_be_served_is_refused_at_once_and_leaves_nothing(pair: Pair) -> None:
    broken = Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "nonsense"}')
    for grammar, params, output in [
        (broken, SAMPLED, []),
        (JSON, replace(SAMPLED, ignore_eos=True), []),
        (JSON, replace(SAMPLED, eos_token_ids=()), []),
        (JSON, SAMPLED, [17, 18]),  # an output that is not the grammar's
    ]:
        for local in (True, False):
            with pytest.raises(InvalidRequest):
                await pair.generate(
                    prompt_of(1), params, grammar=grammar, local=local, output=output
                )
    await pair.idle()


@pytest.mark.slow
async def test_ids_do_not_depend_on_the_degrees_of_tensor_parallelism(
    pair: Pair, tiny: str
) -> None:
    asked = [(prompt_of(i), replace(SAMPLED, seed=i), g) for i, g in enumerate((JSON, CHOICE))]
    expected = [(await pair.generate(p, s, grammar=g)).ids() for p, s, g in asked]
    async with running_pair(
        tiny, prefill_tp=2, decode_tp=2, prefill_config=CONFIG, decode_config=CONFIG
    ) as ranks:
        answers = await asyncio.gather(*(ranks.generate(p, s, grammar=g) for p, s, g in asked))
        assert [answer.ids() for answer in answers] == expected
        await ranks.idle()


@pytest.mark.slow
async def test_the_real_model_always_answers_in_the_form_asked_for(
    smollm2: Path, tokenizer: Tokenizer
) -> None:
    """Twenty prompts, greedy and at temperature 1, under each kind of grammar."""
    questions = [
        f"Tell me about {place} as JSON." for place in ("Rome", "Oslo", "Lima", "Bonn", "X")
    ]
    asked = []
    for i in range(20):
        chat = f"<|im_start|>user\n{questions[i % 5]}<|im_end|>\n<|im_start|>assistant\n"
        params = replace(SAMPLED, seed=i, temperature=float(i % 2))
        asked.append((tokenizer.encode(chat).ids, params, [JSON, JSON, REGEX, CHOICE][i // 5]))
    async with running_pair(str(smollm2), prefill_config=CONFIG, decode_config=CONFIG) as pair:
        answers = await asyncio.gather(
            *(pair.generate(p, s, grammar=g, local=i % 5 == 4) for i, (p, s, g) in enumerate(asked))
        )
        await pair.idle()
    for (_, _, grammar), answer in zip(asked, answers, strict=True):
        assert answer.finish is FinishReason.STOP
        check(grammar, tokenizer.decode(answer.ids()[:-1], skip_special_tokens=False))
