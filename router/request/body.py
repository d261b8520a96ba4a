"""The base class of what clients send, the types that several fields share, and the fields that are
known without being served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, dataclass_transform

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest
from protocol.message import KeywordOnly

#: Integers beyond 64 bits have no meaning in any field and no form in protobuf.
Int64 = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
#: Templates and grammars walk through JSON by recursion.
MAX_DEPTH = 64


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Body(msgspec.Struct, metaclass=KeywordOnly, frozen=True, forbid_unknown_fields=True):
    """An object of a request. Fields that it does not know are left out and named (strictly: they
    are refused unless null or one of `neutral`); those of `unserved` would change the result, and
    are refused unless null, empty or neutral. What generates names its `endpoint`: fields of the
    others are refused there."""

    endpoint: ClassVar[str] = ""
    neutral: ClassVar[tuple[Any, ...]] = ()
    unserved: ClassVar[frozenset[str]] = frozenset()


#: Known fields that are not served: refused by name unless neutral, so that none is ignored. A
#: neutral value asks for what happens anyway, so clients that always send their defaults work;
#: null is neutral everywhere.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    # Fields and names of other servers.
    "add_special_tokens": (),  # what is neutral depends on the kind of request
    "regex": (),
    "ebnf": (),
    "stop_regex": ([], ""),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "thinking_token_budget": (),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
}
#: What serves the purpose of some of them.
INSTEAD = {
    "functions": "tools",
    "function_call": "tool_choice",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "stop_regex": "stop",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_embeds": "prompt",
    "return_tokens_as_token_ids": "return_token_ids",
}

#: Fields that change no result: any endpoint may be sent them.
ANYWHERE = frozenset({"stream_options", "user", "service_tier", "prompt_cache_retention"})
#: Known fields that change no result here: hints, and what is done with the answer elsewhere.
HINTS: dict[str, tuple[Any, ...]] = {
    "prediction": (),
    "verbosity": ("medium",),
    "store": (False,),
    "prompt_cache_options": (),
}

#: Labels for the operator, or names for a cache that needs none: accepted in strict mode too.
HARMLESS = frozenset({"metadata", "safety_identifier", "prompt_cache_key"})


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # `logprobs: 0` asks for something, `logprobs: false` does not; in Python they are equal.
    return value is None or any(
        value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
    )


def check_depth(value: object, param: str) -> None:
    """Raise InvalidRequest when a JSON value is nested deeper than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, Mapping | list)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
