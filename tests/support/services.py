"""Clients of the services of baton.v1: one callable a method, as the descriptors have them."""

from __future__ import annotations

import grpc
from google.protobuf.message_factory import GetMessageClass

from protocol.wire import inference_pb2 as wire


class _Stub:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        service = wire.DESCRIPTOR.services_by_name[self.name]
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


class InferenceStub(_Stub):
    name = "Inference"


class AdminStub(_Stub):
    name = "Admin"
