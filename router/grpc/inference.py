"""baton.v1.Inference."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from grpc import aio

from protocol.wire import inference_pb2 as pb
from router.auth.keys import Caller
from router.dispatch.request_run import RequestRun
from router.grpc import answers, requests
from router.grpc.call import metadata_value, trace_of
from router.offload import off_loop
from router.request.generate_request import REQUEST_ID, GenerateRequest, make_request_id
from router.service import FrontEnd, InferenceService

_Context = aio.ServicerContext[Any, Any]

#: Most stacks limit metadata; a longer timeline is in the last message only.
_MAX_TRAILER_CHARS = 4096
#: The remaining time that gRPC reports without a deadline.
_NO_DEADLINE_S = 1e8
#: gRPC's timers may end a call this long before its deadline.
_CLOCK_SLACK_S = 0.005


class InferenceServicer:
    """The methods, as gRPC calls them."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def generate(
        self, request: pb.GenerateRequest, context: _Context, caller: Caller
    ) -> None:
        """Stream one request's output.

        Writes to the context instead of yielding, so that a cancelled call unwinds here at once.
        """
        arrival = self._service.clock()
        request_id = make_request_id(metadata_value(context, REQUEST_ID))
        context.set_trailing_metadata(((REQUEST_ID, request_id.name),))
        with self._service.track(
            FrontEnd.GRPC, "generate", request_id, overdue=partial(_overdue, context)
        ):
            parsed = requests.generate_request(request)
            token_ids = not request.HasField("return_token_ids") or request.return_token_ids
            async with self._service.generate(
                parsed,
                request_id=request_id,
                caller=caller,
                arrival=arrival,
                trace=trace_of(context),
                time_left_s=_time_left_s(context),
            ) as run:
                last = await self._relay(parsed, run, context, token_ids=token_ids)
        # The request no longer counts: a client with its answer can send the next at once.
        await context.write(last)

    async def list_models(
        self, request: pb.ListModelsRequest, context: _Context, caller: Caller
    ) -> pb.ListModelsResponse:
        models = [
            pb.Model(
                id=model.id,
                created=model.created,
                owned_by="baton",
                max_model_len=model.max_model_len,
            )
            for model in self._service.models(caller)
        ]
        return pb.ListModelsResponse(models=models)

    async def tokenize(
        self, request: pb.TokenizeRequest, context: _Context, caller: Caller
    ) -> pb.TokenizeResponse:
        tokens = await self._service.tokenize(requests.tokenize_request(request), caller)
        return pb.TokenizeResponse(
            tokens=tokens.ids, count=len(tokens.ids), max_model_len=tokens.max_model_len
        )

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: _Context, caller: Caller
    ) -> pb.DetokenizeResponse:
        text = await self._service.detokenize(requests.detokenize_request(request), caller)
        return pb.DetokenizeResponse(prompt=text)

    async def _relay(
        self,
        request: GenerateRequest,
        run: RequestRun,
        context: _Context,
        *,
        token_ids: bool,
    ) -> pb.GenerateResponse:
        """Send the output and return the last message, unsent."""
        message = pb.GenerateResponse(
            id=run.request_id,
            model=self._service.model_name,
            created=int(run.arrival),
        )
        if request.service_tier is not None:
            message.service_tier = run.tier_name
        opened: set[int] = set()
        num_tokens = 0
        async for deltas in run:
            for delta in deltas:
                choice = answers.add_choice(message, delta, token_ids=token_ids)
                if delta.scores is not None or delta.prompt_scores is not None:
                    add = partial(answers.add_logprobs, choice, delta, request, run.token_table)
                    await off_loop(add, size=delta.num_scores)
                if request.return_token_ids and delta.index not in opened:
                    opened.add(delta.index)
                    choice.prompt_token_ids.extend(run.prompts[delta.index])
                if not request.stream:
                    continue
                num_tokens += len(delta.token_ids)
                if request.continuous_usage:
                    so_far = replace(run.usage, completion_tokens=num_tokens)
                    message.usage.CopyFrom(pb.Usage(**so_far.to_json()))
                await context.write(message)
                message = pb.GenerateResponse()
        message.choices.sort(key=lambda choice: choice.index)
        message.usage.CopyFrom(pb.Usage(**run.usage.to_json()))
        if request.timeline:
            timeline = run.timeline()
            message.timeline.CopyFrom(pb.Timeline(**timeline))
            trailer = json.dumps(timeline)
            if len(trailer) <= _MAX_TRAILER_CHARS:
                named = context.trailing_metadata()
                context.set_trailing_metadata((*named, ("baton-timeline", trailer)))
        return message


def _time_left_s(context: _Context) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None or left_s > _NO_DEADLINE_S else left_s


def _overdue(context: _Context) -> bool:
    """Whether a call that was cancelled has run out of its own time."""
    left_s = _time_left_s(context)
    return left_s is not None and left_s <= _CLOCK_SLACK_S
