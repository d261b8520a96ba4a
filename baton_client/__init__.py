"""The Python client of baton.v1: typed, synchronous and asynchronous.

    from baton_client import BatonClient

    with BatonClient("localhost:9000") as client:
        for part in client.generate("Once upon a time", max_tokens=64):
            print(part.text, end="", flush=True)

Needs grpcio and protobuf only. Calls that fail for a passing reason are tried again within their
deadline, a stream that breaks goes on where it stopped (docs/grpc.md).

requests: options of a request, and the message that they make
errors: the error of a call
progress: what a stream has so far, and how it goes on; pure
calls: what the two clients have in common
client, aio: the two clients
"""

from baton_client.aio import AsyncBatonClient, AsyncGenerateStream
from baton_client.channel import TlsFiles
from baton_client.client import BatonClient, GenerateStream
from baton_client.errors import CallError
from baton_client.progress import OutputPart, Retry, WholeOutput
from baton_client.requests import Options

__all__ = [
    "AsyncBatonClient",
    "AsyncGenerateStream",
    "BatonClient",
    "CallError",
    "GenerateStream",
    "Options",
    "OutputPart",
    "Retry",
    "TlsFiles",
    "WholeOutput",
]
