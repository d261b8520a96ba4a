"""Keeps a copying thread from raising an OpenMP team of its own."""

from __future__ import annotations

import ctypes

import torch


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
