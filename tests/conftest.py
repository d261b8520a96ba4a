"""Common settings of all tests: one thread a process, a clean environment, no accidental GPU."""

import gc
import importlib.util
import logging
import os
import sys
import warnings

import pytest
from hypothesis import HealthCheck, settings

# Hundreds of thousands of objects are made while tests are collected, and all of them stay.
gc.disable()
# Before torch is imported, here and in child processes: two cores are shared by many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of the tokenizers' pool do not survive a fork: a child would wait for them forever.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anything imports triton (transformers does): without a GPU its kernels are interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [n for n in os.environ if n.startswith("BATON_") and n != "BATON_HOME"]:
    del os.environ[name]
# A busy machine must not fail a property; the same examples are drawn every time, others with
# `--hypothesis-seed=random`.
settings.register_profile(
    "baton",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=True,
)
settings.load_profile("baton")


def has_cuda():
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file at a time, but clusters and GPUs, which there is one of, in one process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            alone = nodeid.startswith(("tests/cluster/", "tests/gpu/"))
            return "alone" if alone else super()._split_scope(nodeid)

    return Scheduling(config, log)


class LostBlocks(logging.Handler):
    """Records errors of workers in this process about lost KV blocks."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if "KV blocks are held" in record.getMessage():
            self.found.append(record.blocks)


losses = LostBlocks()
logging.getLogger("baton.worker_runtime.step_loop").addHandler(losses)


@pytest.fixture(autouse=True)
def lost_blocks():
    """How many blocks a worker had lost each time it said so: no test may leave any."""
    losses.found.clear()
    yield losses.found
    assert losses.found == []


@pytest.fixture
def poisoned_memory():
    """Memory that torch gives without filling it is NaN, or the largest integer: what a kernel
    reads before something wrote it shows in every run, not only after another use of it."""
    import torch

    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic")
        yield
    torch.use_deterministic_algorithms(False)


INTERPRETED = ("tests/unit/engine/kernels", "tests/unit/engine/cuda")


frozen_modules = 0


def keep_what_imports_made():
    """Leave it out of the collector's rounds, which are seconds of CPU otherwise."""
    global frozen_modules
    if len(sys.modules) > frozen_modules + 100:
        gc.freeze()
        frozen_modules = len(sys.modules)


def pytest_collection_finish():
    keep_what_imports_made()
    gc.enable()
    # pytest puts its handlers on each logger that does not propagate, six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_logfinish():
    keep_what_imports_made()


def pytest_collection_modifyitems(items):
    if not has_cuda():
        for item in items:
            if any(folder in item.path.as_posix() for folder in INTERPRETED):
                item.add_marker(pytest.mark.slow)  # without a GPU, triton interprets kernels
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # Where files are spread over the cores, those that take long must not be the last to begin.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
