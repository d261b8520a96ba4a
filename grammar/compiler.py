"""Compiles grammars against one vocabulary, each once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from llguidance import (
    LLExecutor,
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    grammar_from,
    regex_to_lark,
)

from grammar.bounds import JSON_WHITESPACE, check_source
from grammar.matcher import Matcher, compute_masks
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Compiled grammars kept; one takes up to about 2 kB for each of MAX_LEXER_STATES.
MAX_KEPT = 64
MAX_LEXER_STATES = 20_000
_JSON_STYLE: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}


class Compiler:
    """Thread-safe. What it made (or why it could not) is kept by content, so the cost of a grammar
    is paid once; `threads` compute masks."""

    def __init__(self, vocabulary: LLTokenizer, *, threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._special = _special_texts(vocabulary)
        self._executor = LLExecutor(num_threads=threads)
        self._kept: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        self._lock = Lock()

    def start(
        self, grammar: Grammar, *, ends: Sequence[int] = (), output: Sequence[int] = ()
    ) -> Matcher:
        """A matcher of an output that has the tokens `output` so far, with its mask.

        Blocking, about a millisecond for a usual schema and without the GIL. Raises InvalidRequest
        saying what is wrong with the grammar.
        """
        state = self._compiled(grammar).deep_copy()
        matcher = Matcher(state, self._executor, self._vocabulary, ends=ends)
        if output:
            matcher.take(output)
        compute_masks([matcher])
        if matcher.error:
            raise InvalidRequest(matcher.error)
        return matcher

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
            with self._lock:
                self._kept[grammar] = known
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(known, str):
            raise InvalidRequest(known)
        return known

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        """The matcher at its start, or why there is none."""
        try:
            check_source(grammar)
            text = _to_llguidance(grammar)
            plain = grammar.source.replace("\\", "")
            if any(special in plain for special in self._special):
                text = _spelled(text, grammar.kind)
        except InvalidRequest as error:
            return error.message
        except ValueError as error:
            return str(error)
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        state = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        return state.get_error().strip() if state.is_error() else state


def _special_texts(vocabulary: LLTokenizer) -> list[str]:
    ids = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
    texts = (vocabulary.decode_str([token]) for token in ids)
    return [text for text in texts if text and not text.startswith("<[")]  # padding has no text


def _spelled(text: str, kind: GrammarKind) -> str:
    """A grammar in which a special token's text is text like any other. Where only one text fits,
    the library would have what the tokenizer makes of it, the special token, which does not."""
    if kind is GrammarKind.JSON_SCHEMA:
        text = f"start: %json {json.dumps(json.loads(text)['grammars'][0]['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{text}'


def _to_llguidance(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE)
        case GrammarKind.REGEX:
            # \d is 0-9 here, as most regular expressions mean it, and not every script's digits.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.source, 'd')}/")
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.source))
            # A terminal: as alternatives of a rule, some thousand of them are too many.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case GrammarKind.LARK:
            return grammar_from("grammar", grammar.source)
