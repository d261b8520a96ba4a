"""A chat over gRPC: `python examples/grpc/chat.py localhost:9000 What is a baton?`."""

from __future__ import annotations

import sys

from baton_client import BatonClient, CallError


def main() -> None:
    address, *words = sys.argv[1:]
    messages = [{"role": "user", "content": " ".join(words)}]
    with BatonClient(address, timeout_s=60) as client:
        try:
            stream = client.generate(messages=messages, max_tokens=64, temperature=0.7)
            for part in stream:
                sys.stdout.write(part.text)
                sys.stdout.flush()
        except CallError as error:
            sys.exit(f"\n{error} (field {error.param}, request {error.request_id})")
    usage = stream.so_far.usage
    if usage is not None:
        sys.stdout.write(f"\n[{stream.so_far.finish_reason}, {usage.total_tokens} tokens]\n")


if __name__ == "__main__":
    main()
