"""One worker of the hand-off benchmark in a process of its own, controlled over a pipe.

The process sees only its own GPUs, as under a cluster's scheduler.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from benchmarks.handoff.raw_links import DEVICE
from benchmarks.handoff.worker import PATIENCE_S, BenchWorker
from protocol.ids import Role

_SWITCH_S = 0.05e-3  # so that link threads get the interpreter's lock soon


def _child(role: Role, pipe: Connection) -> None:
    torch.cuda.set_device(DEVICE)
    sys.setswitchinterval(_SWITCH_S)
    uvloop.run(_serve(BenchWorker(role), pipe))  # as Serve's replicas do


async def _serve(worker: BenchWorker, pipe: Connection) -> None:
    while True:
        try:
            name, args = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            await worker.drop()
            return
        try:
            pipe.send((await getattr(worker, name)(*args), None))
        except Exception as error:  # noqa: BLE001 - the parent has to know
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Process:
    """The parent's handle of one worker."""

    def __init__(self, role: Role, *gpus: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(gpu) for gpu in range(256)] if visible is None else visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in dict.fromkeys(gpus))
        self._child = context.Process(target=_child, args=(role, other))
        self._child.start()
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        other.close()
        self.role = role

    @property
    def pid(self) -> int:
        return self._child.pid or 0

    def start(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def result(self) -> Any:
        """Wait for the started command. Raises RuntimeError with the child's error."""
        if not self._pipe.poll(PATIENCE_S + 30):
            raise RuntimeError(f"{self.role} does not answer")
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(f"{self.role}: {error}")
        return result

    def do(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.result()

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()
        self._child.join(10)
        self._pipe.close()

    def close(self) -> None:
        self._pipe.close()
        self._child.join(10)
        self._child.kill()
