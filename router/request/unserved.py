"""Fields that are known but not served: refused by name unless neutral, so that none is ignored.

A neutral value asks for what happens anyway (`best_of: 1`), so clients that always send their
defaults work.
"""

from __future__ import annotations

from typing import Any

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
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    # `logprobs: 0` asks for something, `logprobs: false` does not; in Python they are equal.
    return value is None or any(
        value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
    )
