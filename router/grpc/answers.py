"""From the router's values to messages of baton.v1."""

from __future__ import annotations

from dataclasses import asdict

from msgspec import structs

from protocol.wire import inference_pb2 as pb
from router.admin import ClusterInfo, PoolInfo, WorkerInfo
from router.dispatch.request_run import Delta, Score
from router.request.generate_request import GenerateRequest
from router.text.detokenizer import TokenTable


def add_choice(message: pb.GenerateResponse, delta: Delta, *, token_ids: bool) -> pb.Choice:
    """In place, and only what a delta has: most have a text and a token, and every field set costs
    time."""
    choice = message.choices.add()
    if delta.index:
        choice.index = delta.index
    choice.text = delta.text
    if token_ids:
        choice.token_ids.extend(delta.token_ids)
    if delta.reasoning:
        choice.reasoning = delta.reasoning
    if delta.finish is not None:
        choice.finish_reason = delta.finish.value
    for call in delta.calls:
        choice.tool_calls.add(
            index=call.index, id=call.id, name=call.name, arguments=call.arguments
        )
    return choice


def add_logprobs(
    choice: pb.Choice, delta: Delta, request: GenerateRequest, pieces: TokenTable
) -> None:
    prompt = delta.prompt_scores or ()
    if request.num_logprobs is not None:
        shown = (*(prompt if request.echoes_prompt else ()), *(delta.scores or ()))
        choice.logprobs.extend(_logprob(score, request.num_logprobs, pieces) for score in shown)
    if request.prompt_logprobs is not None:
        count = request.prompt_logprobs
        choice.prompt_logprobs.extend(_logprob(score, count, pieces) for score in prompt)


def _logprob(score: Score, count: int, pieces: TokenTable) -> pb.TokenLogprob:
    piece, logprobs = pieces[score.token], score.logprobs
    message = pb.TokenLogprob(
        token_id=score.token, token=piece.text, bytes=piece.data, text_offset=score.offset
    )
    if logprobs is None:
        return message
    message.logprob, message.rank = logprobs.logprob, logprobs.rank
    pairs = zip(logprobs.top_ids[:count], logprobs.top_logprobs, strict=False)
    for rank, (token, logprob) in enumerate(pairs, start=1):
        piece = pieces[token]
        message.top.add(
            token_id=token, token=piece.text, bytes=piece.data, logprob=logprob, rank=rank
        )
    return message


def cluster_message(view: ClusterInfo) -> pb.Cluster:
    return pb.Cluster(
        model=view.model,
        pools=[_pool(pool) for pool in view.pools],
        routers=[pb.RouterInfo(**asdict(router)) for router in view.routers],
    )


def _pool(pool: PoolInfo) -> pb.Pool:
    least, most = pool.bounds or (None, None)
    return pb.Pool(
        role=pool.role,
        target=pool.target,
        workers=map(_worker, pool.workers),
        min_replicas=least,
        max_replicas=most,
        pinned=pool.pinned,
        reason=pool.reason,
    )


def _worker(worker: WorkerInfo) -> pb.Worker:
    fields = structs.asdict(worker.ref) | structs.asdict(worker.load)
    del fields["role"]  # of the whole pool
    known = pb.Worker.DESCRIPTOR.fields_by_name
    shown = {name: value for name, value in fields.items() if name in known}
    return pb.Worker(**shown, state=worker.state, in_flight=worker.in_flight)
