"""Log-probabilities in the forms of OpenAI's API, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.sampling import TokenLogprobs
from router.dispatch.output_stream import Delta, Score
from router.request.generate_request import GenerateRequest, RequestKind
from router.text.detokenizer import TokenTable


def logprobs_json(
    request: GenerateRequest, pieces: TokenTable, delta: Delta
) -> dict[str, Any] | None:
    """`logprobs` of a choice or of one delta of it; None if not requested."""
    if request.num_logprobs is None:
        return None
    scores = list(_shown(request, delta))
    if request.kind is RequestKind.CHAT:
        shown = [_chat_entry(s, request.num_logprobs, pieces) for s in scores if s.logprobs]
        return {"content": shown, "refusal": None}
    return {
        "tokens": [pieces[score.token].text for score in scores],
        "token_logprobs": [score.logprobs and score.logprobs.logprob for score in scores],
        "top_logprobs": [
            score.logprobs and _top_texts(score.token, score.logprobs, request.num_logprobs, pieces)
            for score in scores
        ],
        "text_offset": [score.offset for score in scores],
    }


def prompt_logprobs_json(
    request: GenerateRequest, pieces: TokenTable, delta: Delta
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` in vLLM's form: null for the first token, then a map from token ids."""
    count = request.prompt_logprobs
    if count is None or delta.prompt_scores is None:
        return None
    return [
        None if score.logprobs is None else _by_id(score.token, score.logprobs, count, pieces)
        for score in delta.prompt_scores
    ]


def _by_id(token: int, logprobs: TokenLogprobs, count: int, pieces: TokenTable) -> dict[str, Any]:
    return {
        str(other): {"logprob": logprob, "rank": rank, "decoded_token": pieces[other].text}
        for other, logprob, rank in _ranked(token, logprobs, count)
    }


def _shown(request: GenerateRequest, delta: Delta) -> Iterator[Score]:
    if request.echoes_prompt:
        yield from delta.prompt_scores or ()
    yield from delta.scores or ()


def _chat_entry(score: Score, count: int, pieces: TokenTable) -> dict[str, Any]:
    assert score.logprobs is not None
    entry = _chat_token(score.token, score.logprobs.logprob, pieces)
    pairs = zip(score.logprobs.top_ids[:count], score.logprobs.top_logprobs, strict=False)
    entry["top_logprobs"] = [_chat_token(token, value, pieces) for token, value in pairs]
    return entry


def _chat_token(token: int, logprob: float, pieces: TokenTable) -> dict[str, Any]:
    piece = pieces[token]
    return {"token": piece.text, "logprob": logprob, "bytes": list(piece.data)}


def _top_texts(
    token: int, logprobs: TokenLogprobs, count: int, pieces: TokenTable
) -> dict[str, float]:
    """Log-probabilities by text; of tokens with the same text, the likeliest."""
    top: dict[str, float] = {}
    for other, logprob, _ in _ranked(token, logprobs, count):
        top.setdefault(pieces[other].text, logprob)
    return top


def _ranked(token: int, logprobs: TokenLogprobs, count: int) -> Iterator[tuple[int, float, int]]:
    """(token, log-probability, rank) of the likeliest, and of the token itself if it is not one."""
    ids = logprobs.top_ids[:count]
    yield from zip(ids, logprobs.top_logprobs, range(1, count + 1), strict=False)
    if token not in ids:
        yield token, logprobs.logprob, logprobs.rank
