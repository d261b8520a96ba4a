"""What the text of an output must look like, as a value that travels with the request."""

from __future__ import annotations

from enum import StrEnum

from protocol.message import Message


class GrammarKind(StrEnum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema
    REGEX = "regex"  # a regular expression that matches the whole output
    CHOICE = "choice"  # a JSON array of strings, of which the output is one
    LARK = "lark"  # a context-free grammar in Lark's syntax, or GBNF


class Grammar(Message):
    """A grammar. Equal values are the same grammar, so compiled ones are kept by value."""

    kind: GrammarKind
    source: str
