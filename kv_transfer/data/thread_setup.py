"""How a thread that copies begins: on its pool's device, and without an OpenMP team of its own."""

from __future__ import annotations

import ctypes

import torch


def enter_thread(device: torch.device) -> None:
    """For a thread that works at a pool on `device`. Until told otherwise a thread is on the first
    GPU that it sees, and whatever names no device, as waiting for an event, costs that one half a
    GiB for a context."""
    use_one_thread()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_one_thread() -> None:
    """Run this thread's tensor operations on this thread alone; other threads are not changed.

    libgomp lets the threads of a team spin between parallel regions only while the process has no
    more team members than processors; beyond that every region sleeps and wakes (gomp's throttled
    spin count). One idle team of a thread that just copies
    would so slow down every step of the engine. On two cores, not quiet, SmolLM2 over HTTP with two
    threads a worker went from 40 to 30 ms a token when loader and copy threads gave theirs up.
    """
    torch.get_num_threads()  # takes the process's setting over for this thread, so that ours stays
    openmp = ctypes.CDLL(None)
    if hasattr(openmp, "omp_set_num_threads"):
        openmp.omp_set_num_threads(1)
