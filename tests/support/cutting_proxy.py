"""A TCP proxy that cuts its connections after so many bytes to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence


@contextlib.asynccontextmanager
async def cutting_proxy(
    address: str, budgets: Sequence[int], cut: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """The proxy's address. Connection i ends after `budgets[i]` bytes, with `cut` not before that
    is set; later ones are whole. A client may lose what it has not read when its connection
    ends."""
    left = list(budgets)
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None
    ) -> None:
        while data := await reader.read(1 << 12):
            if budget is not None:
                data, budget = data[:budget], budget - len(data)
            writer.write(data)
            await writer.drain()
            if budget is not None and budget <= 0:
                if cut is not None:
                    await cut.wait()
                break
        writer.close()  # after what was written: a reset would drop that, too

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = left.pop(0) if left else None
        upstream, up = await asyncio.open_connection(*address.rsplit(":", 1))
        both = [
            asyncio.create_task(pass_on(upstream, writer, budget)),
            asyncio.create_task(pass_on(reader, up, None)),
        ]
        tasks.update(both)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task, end in zip(both, (writer, up), strict=True):
            task.cancel()
            end.close()
        await asyncio.gather(*both, return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
