"""A server of OpenAI's completions API that answers from a script, as fast or slow as asked."""

import asyncio
import json
from contextlib import asynccontextmanager


class Stub:
    """`delay` seconds before the first token and `gap` between tokens; `fail` picks odd answers."""

    def __init__(self, *, delay=0.0, gap=0.0, fail=None, glue=1, close=False):
        self.delay, self.gap, self.fail, self.glue, self.close = delay, gap, fail, glue, close
        self.bodies = []
        self.paths = []
        self.headers = []
        self.running = self.most_running = 0
        self.connections = 0

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                method, path, _ = text.split(" ", 2)
                fields = dict(line.split(": ", 1) for line in text.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("Content-Length", 0)))
                self.paths.append(path)
                self.headers.append(fields)
                if method == "GET" and self.fail == "key":
                    self.plain(writer, 401, {"error": {"message": "a key is required"}})
                elif method == "GET":
                    self.plain(writer, 200, {"data": [{"id": "stub-model"}]})
                else:
                    self.bodies.append(json.loads(body))
                    await self.answer(writer, path, self.bodies[-1])
                await writer.drain()
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def plain(self, writer, status, value):
        data = json.dumps(value).encode()
        length = f"Content-Length: {len(data)}\r\n"
        writer.write(f"HTTP/1.1 {status} x\r\n{length}\r\n".encode() + data)

    async def answer(self, writer, path, body):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.stream(writer, path, body)
        finally:
            self.running -= 1

    async def stream(self, writer, path, body):
        if self.fail == "status":
            return self.plain(writer, 429, {"error": {"message": "busy"}})
        if self.fail == "close":
            return writer.close()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n")
        writer.write(b"Connection: close\r\n\r\n" if self.close else b"\r\n")
        await asyncio.sleep(self.delay)
        count = body["max_tokens"] - (1 if self.fail == "short" else 0)
        if "chat" in path:
            self.chunk(writer, [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}])
        for first in range(0, count, self.glue):
            if first:
                await asyncio.sleep(self.gap)
            numbers = range(first, min(first + self.glue, count))
            events = [self.token(path, number) for number in numbers]
            if body.get("return_token_ids"):
                for event, number in zip(events, numbers, strict=True):
                    event["choices"][0]["token_ids"] = [number]
            self.chunk(writer, events)
            if self.fail == "event" and first:
                self.chunk(writer, [{"error": {"message": "worker lost"}}])
        usage = {"completion_tokens": count, "prompt_tokens": len(body.get("prompt", ())) or 7}
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] // 4}
        self.chunk(writer, [{"choices": [], "usage": usage}])
        if self.fail != "no end":
            self.chunk(writer, [None])
        writer.write(b"0\r\n\r\n")

    def token(self, path, number):
        text = f"t{number} "
        return {"choices": [{"delta": {"content": text}} if "chat" in path else {"text": text}]}

    def chunk(self, writer, events):
        lines = (json.dumps(event) if event else "[DONE]" for event in events)
        data = "".join(f"data: {line}\n\n" for line in lines).encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def running(stub):
    """The stub on a free port; yields its URL."""
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()
