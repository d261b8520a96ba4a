"""Fields that are known but not served: refused by name unless neutral, so that none is ignored.

A neutral value asks for what would happen anyway (`best_of: 1`), so clients that always
send their defaults work.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from protocol.errors import InvalidRequest, Unsupported
from router.request.fields import Fields

#: Field -> its neutral values. null is neutral everywhere.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "moderation": (),
    "prompt_cache_options": (),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
}

#: Accepted and without effect on the output: labels for the operator, or hints.
HARMLESS = frozenset(
    {
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)


def check_fields(
    fields: Fields, served: frozenset[str], *, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise Unsupported or InvalidRequest naming the first field that is not served; `elsewhere`
    says what a field belongs to that other requests have."""
    for name, value in fields.items():
        if name in served or name in HARMLESS or value is None:
            continue
        if name in elsewhere:
            raise InvalidRequest(f"{name} is a field of {elsewhere[name]}", param=name)
        if name not in UNSERVED:
            raise InvalidRequest(f"unknown field: {name}", param=name)
        if name == "best_of" and value == fields.get("n"):
            continue  # the best n of n: all of them
        if not _neutral(value, UNSERVED[name]):
            raise Unsupported(f"{name} is not supported yet", param=name)


def _neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # `logprobs: 0` asks for something, `logprobs: false` does not; in Python they are equal.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
