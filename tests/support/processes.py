"""Child processes, forked from one server that has imported torch and all that they run once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "pytest",
    "tests.support.chaos_host",
    "tests.support.pair",
    "tests.support.rank_process",
    "tests.support.transfer_process",
]


def forks() -> ForkServerContext:
    """The context whose processes start in milliseconds, with no thread or lock of the parent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
