"""Many requests at once over gRPC, the prompts from standard input, one a line:
`python examples/grpc/many.py localhost:9000 < prompts.txt`."""

from __future__ import annotations

import asyncio
import sys

from baton_client import AsyncBatonClient, CallError, WholeOutput


async def main() -> None:
    prompts = [line.rstrip("\n") for line in sys.stdin]
    async with AsyncBatonClient(sys.argv[1], timeout_s=120) as client:
        calls = [client.generate(prompt, max_tokens=32).answer() for prompt in prompts]
        results = await asyncio.gather(*calls, return_exceptions=True)
    for prompt, result in zip(prompts, results, strict=True):
        shown = result.text if isinstance(result, WholeOutput) else f"failed: {result}"
        sys.stdout.write(f"{prompt!r}: {shown!r}\n")
    failures = [one for one in results if isinstance(one, BaseException)]
    if not all(isinstance(one, CallError) for one in failures):
        raise failures[0]


if __name__ == "__main__":
    asyncio.run(main())
