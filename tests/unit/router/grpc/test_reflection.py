"""A client that knows an address and nothing else, as grpcurl does: reflection alone."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.router_front_ends import FrontEnds


class Reflected:
    """Services and messages as a server tells them."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel
        self._stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    async def _ask(self, **query: str) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**query)
        call = self._stub.ServerReflectionInfo()
        await call.write(request)
        await call.done_writing()
        return await call.read()

    async def services(self) -> set[str]:
        answer = await self._ask(list_services="")
        return {service.name for service in answer.list_services_response.service}

    async def _learn(self, **query: str) -> None:
        answer = await self._ask(**query)
        assert not answer.HasField("error_response"), answer
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for needed in file.dependency:
                await self._learn(file_by_filename=needed)
            self._pool.Add(file)

    async def call(self, service: str, method: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Call a method with fields as JSON; its answers as JSON."""
        await self._learn(file_containing_symbol=service)
        found = self._pool.FindServiceByName(service).methods_by_name[method]
        request = ParseDict(fields, message_factory.GetMessageClass(found.input_type)())
        answer = message_factory.GetMessageClass(found.output_type)
        kind = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        call = kind(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )(request, timeout=60)
        if not found.server_streaming:
            return [MessageToDict(await call)]
        return [MessageToDict(message) async for message in call]


async def test_every_service_can_be_called_by_what_it_says_of_itself(front_ends: FrontEnds) -> None:
    client = Reflected(front_ends.channel)
    assert await client.services() >= {
        "baton.v1.Inference",
        "baton.v1.Admin",
        "grpc.health.v1.Health",
    }
    health = await client.call("grpc.health.v1.Health", "Check", {"service": "baton.v1.Inference"})
    assert health == [{"status": "SERVING"}]
    models = await client.call("baton.v1.Inference", "ListModels", {})
    assert models[0]["models"][0]["id"] == "tiny"
    tokens = await client.call("baton.v1.Inference", "Tokenize", {"prompt": "hello"})
    asked = {"prompt": "hello", "maxTokens": "4", "temperature": 0}
    messages = await client.call("baton.v1.Inference", "Generate", asked)
    assert len(messages) == 5  # one for each token, and the usage
    assert messages[0]["model"] == "tiny"
    usage = messages[-1]["usage"]
    assert usage["promptTokens"] == tokens[0]["count"]
    assert usage["completionTokens"] == "4"
    pools = (await client.call("baton.v1.Admin", "GetCluster", {}))[0]["pools"]
    assert {pool["role"] for pool in pools} == {"prefill", "decode"}
