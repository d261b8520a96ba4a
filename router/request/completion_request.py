"""The fields of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from msgspec import Meta

from protocol.errors import InvalidRequest
from router.request.generate_request import GenerateRequest, Prompt, RequestKind

MAX_PROMPTS = 256


class CompletionRequest(GenerateRequest):
    """POST /v1/completions.

    prompt: a string, token ids, or an array of either (gRPC: `prompt`, `prompt_token_ids`,
        `prompts`).
    echo: the prompt comes before the output, with its log-probabilities if `logprobs`.
    """

    kind = RequestKind.COMPLETION

    prompt: str | Annotated[Sequence[int | str | Sequence[int]], Meta(min_length=1)]
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_prompts(self.prompts)
        for prompt in self.prompts:
            _check_prompt(prompt)

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (cast(Prompt, self.prompt),)
        return cast(Sequence[Prompt], self.prompt)

    @property
    def echoes_prompt(self) -> bool:
        return self.echo


def check_num_prompts(prompts: Sequence[object]) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS}, got {len(prompts)}", param="prompt")


def _check_prompt(prompt: object) -> None:
    """Types alone allow arrays of prompts and token ids mixed."""
    if isinstance(prompt, int):
        raise InvalidRequest("prompt mixes prompts and token ids", param="prompt")
    if isinstance(prompt, list):
        if not prompt:
            raise InvalidRequest("prompt must not be an empty array", param="prompt")
        if set(map(type, prompt)) != {int}:
            raise InvalidRequest("prompt must be an array of integers", param="prompt")
