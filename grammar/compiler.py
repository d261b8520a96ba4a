"""Compiles grammars against one vocabulary, and caches them."""

from __future__ import annotations

import json
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

from concurrency.bounded_map import BoundedMap
from grammar.bounds import JSON_WHITESPACE, check_source
from grammar.matcher import Matcher, compute_masks
from grammar.schema import for_library, lark_for_library
from protocol.errors import InvalidRequest
from protocol.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Compiled grammars in the cache; one takes up to about 2 kB for each of MAX_LEXER_STATES.
MAX_CACHED = 64
MAX_LEXER_STATES = 20_000
_JSON_STYLE: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}


class Compiler:
    """Safe from any thread. Caches compiled grammars, and errors; `threads` compute masks."""

    def __init__(self, vocabulary: LLTokenizer, *, threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._special = _special_texts(vocabulary)
        self._executor = LLExecutor(num_threads=threads)
        self._cache: BoundedMap[Grammar, LLMatcher | str] = BoundedMap(MAX_CACHED)
        self._lock = Lock()

    def start(
        self, grammar: Grammar, *, ends: Sequence[int] = (), output: Sequence[int] = ()
    ) -> Matcher:
        """A matcher of an output that begins with the tokens `output`, with its mask.

        Blocks, about a millisecond for a usual schema, without the GIL. Raises InvalidRequest.
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
            compiled = self._cache.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._cache.put(grammar, compiled)  # as the most recently used
        if isinstance(compiled, str):
            raise InvalidRequest(compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        """A matcher in its first state, or the error."""
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
    """The grammar with special tokens' text as ordinary text. Where only one text fits, the library
    would force the tokenizer's ids for it, among them the special token, which does not match."""
    if kind is GrammarKind.JSON_SCHEMA:
        text = f"start: %json {json.dumps(json.loads(text)['grammars'][0]['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{text}'


def _to_llguidance(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                for_library(grammar.source), defaults=_JSON_STYLE
            )
        case GrammarKind.REGEX:
            # \d is 0-9, as most regular expressions mean it, not the digits of every script.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.source, 'd')}/")
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.source))
            # A terminal: thousands of alternatives of a rule are too many.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case GrammarKind.LARK:
            return grammar_from("grammar", lark_for_library(grammar.source))
