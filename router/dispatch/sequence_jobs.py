"""The sequences that a request asks workers to run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from protocol.errors import ContextTooLong, InvalidRequest
from protocol.sampling import MAX_SEED, WITH_DEFAULTS, Grammar, SamplingParams
from protocol.timeline import TraceContext
from router.request.generate_request import (
    DEFAULT_COMPLETION_TOKENS,
    GenerateRequest,
    RequestId,
    RequestKind,
)
from router.workers.bookkeeping import PromptBlocks

#: Log-probabilities of prompt tokens in one answer.
MAX_PROMPT_SCORES = 1 << 18
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceJob:
    """One output to make. `index` is its place among the request's choices, `deadline` in seconds
    since the Unix epoch. The outputs of one prompt have the same `blocks`. `request_name` is for
    logs. `gap_s`: the longest promised time between two tokens. `first_due`: when the first is
    promised, on the clock of `deadline`. `keep_s`: the conversation should return within so many
    seconds."""

    request_id: str
    request_name: str
    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float
    blocks: PromptBlocks
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    wants_timeline: bool = False
    trace: TraceContext | None = None
    grammar: Grammar | None = None
    gap_s: float | None = None
    first_due: float | None = None
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits of a sequence: ids are below `vocab_size`; tokens in all are at most `context` by the
    model and `capacity` by the largest decode worker's KV pool."""

    vocab_size: int
    context: int
    capacity: int

    @property
    def total(self) -> int:
        return min(self.context, self.capacity)


def base_sampling(
    request: GenerateRequest,
    limits: TokenLimits,
    *,
    eos_ids: Sequence[int],
    seed: int,
    defaults: Mapping[str, Any] = _NONE,
) -> SamplingParams:
    """The request's sampling parameters, checked except for what depends on the prompt.

    `defaults` are the model's own, for what the request leaves unset.
    """
    requested = {name: getattr(request, name) for name in WITH_DEFAULTS}
    chosen = dict(defaults) | {name: v for name, v in requested.items() if v is not None}
    sampling = SamplingParams(
        **chosen,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.biases,
        seed=seed if request.seed is None else request.seed & MAX_SEED,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_scores,
        max_tokens=limits.context if request.output_limit is None else request.output_limit,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        eos_token_ids=tuple(eos_ids),
    )
    sampling.validate(limits.vocab_size)
    return sampling


def check_ids(ids: Sequence[int], limits: TokenLimits, *, param: str) -> None:
    """Raise InvalidRequest unless there are ids and all are in the vocabulary."""
    if not ids:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < limits.vocab_size:
            raise InvalidRequest(
                f"{param}: token id {worst} is outside the vocabulary of {limits.vocab_size}",
                param=param,
            )


def check_prompt_ids(request: GenerateRequest, limits: TokenLimits) -> None:
    """Check the prompts that came as ids, their lengths first."""
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            if min(len(prompt), request.truncate_prompt_tokens or len(prompt)) > limits.total:
                raise _too_long(f"the prompt has {len(prompt)} tokens", limits, param="prompt")
            check_ids(prompt, limits, param="prompt")


def make_jobs(
    request: GenerateRequest,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    limits: TokenLimits,
    *,
    request_id: RequestId,
    deadline: float,
    grammar: Grammar | None = None,
) -> list[SequenceJob]:
    """One job for each choice: prompt number times n plus number of the completion."""
    param = "messages" if request.kind is RequestKind.CHAT else "prompt"
    _check_scores(request, sum(map(len, prompts)))
    jobs = []
    for i, ids in enumerate(prompts):
        check_ids(ids, limits, param=param)
        fitted = replace(sampling, max_tokens=output_tokens(request, len(ids), limits, param=param))
        fitted.validate(limits.vocab_size)
        blocks = PromptBlocks(ids, request.cache_salt)
        for j in range(request.n):
            index = i * request.n + j
            jobs.append(
                SequenceJob(
                    request_id=f"{request_id.key}-{index}",
                    request_name=request_id.name,
                    index=index,
                    prompt_ids=ids,
                    sampling=replace(fitted, seed=(fitted.seed + j) & MAX_SEED),
                    deadline=deadline,
                    blocks=blocks,
                    cache_salt=request.cache_salt,
                    bypass_prefix_cache=fitted.prompt_logprobs is not None,
                    wants_timeline=request.timeline,
                    grammar=grammar,
                )
            )
    return jobs


def _check_scores(request: GenerateRequest, num_prompt_tokens: int) -> None:
    """Bound the log-probabilities of prompts: an answer holds them all at once."""
    if request.prompt_scores is None:
        return
    count = request.n * num_prompt_tokens * (request.prompt_scores + 1)
    if count > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"{count} log-probabilities of prompts are requested, at most {MAX_PROMPT_SCORES}",
            param="echo" if request.prompt_logprobs is None else "prompt_logprobs",
        )


def output_tokens(
    request: GenerateRequest, num_prompt_tokens: int, limits: TokenLimits, *, param: str
) -> int:
    """`max_tokens` of one sequence: as requested, or the default of the kind of request."""
    rest = limits.total - num_prompt_tokens
    if rest < 1 and not (rest == 0 and request.output_limit == 0):
        raise _too_long(f"the prompt has {num_prompt_tokens} tokens", limits, param=param)
    if request.output_limit is None:
        chat = request.kind is RequestKind.CHAT
        return rest if chat else min(rest, max(DEFAULT_COMPLETION_TOKENS, request.min_tokens))
    if request.output_limit > rest and request.fits_output:
        return rest
    if request.output_limit > rest:
        raise _too_long(
            f"the prompt has {num_prompt_tokens} tokens and {request.output_limit_param} is "
            f"{request.output_limit}",
            limits,
            param=request.output_limit_param,
        )
    return request.output_limit


def _too_long(what: str, limits: TokenLimits, *, param: str) -> ContextTooLong:
    """The error of a sequence that cannot fit, naming the limit it runs into."""
    if limits.capacity < limits.context:
        return ContextTooLong(
            f"{what}; a sequence can have {limits.capacity} tokens in the KV pool", param=param
        )
    return ContextTooLong(f"{what}; the model's context is {limits.context} tokens", param=param)
