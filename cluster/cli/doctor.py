"""`baton doctor`: what this machine has for serving, and what is missing."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster.cli.console import Console
from cluster.config.load import load_config
from cluster.config.schema import NetworkSection
from cluster.local.paths import baton_home
from engine.kv.sizing import available_memory
from router.fingerprint import baton_version

GIB = 1 << 30
_MIN_DISK, _MIN_SHM, _MIN_FILES = 5 * GIB, GIB, 8704
_PACKAGES = ("ray", "torch", "grpcio", "uvicorn", "tokenizers", "msgspec")
_COMMAND_S = 20.0
#: adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5
_TIMEX_BYTES = 208


class Severity(StrEnum):
    """What a finding means."""

    OK = "ok"
    WARN = "warn"  # something will not work, or work worse
    FAIL = "fail"  # nothing will be served


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    severity: Severity
    text: str


def run(options: argparse.Namespace, console: Console) -> int:
    """Print a line for each finding; 1 if one of them prevents serving."""
    network = NetworkSection()
    if options.config is not None:
        network = load_config(options.config, environ=os.environ).config.network
    findings = [finding for look in _LOOKS for finding in look()] + list(_ports(network))
    rows = [(finding.severity, finding.subject, finding.text) for finding in findings]
    console.table(("", "WHAT", "FOUND"), rows)
    return int(any(finding.severity is Severity.FAIL for finding in findings))


def _found(subject: str, text: str, *, problem: str = "", fails: bool = False) -> Finding:
    if not problem:
        return Finding(subject=subject, severity=Severity.OK, text=text)
    severity = Severity.FAIL if fails else Severity.WARN
    return Finding(
        subject=subject, severity=severity, text=f"{text}: {problem}" if text else problem
    )


def _software() -> Iterator[Finding]:
    linux = sys.platform == "linux"
    text = f"{baton_version()} on Python {platform.python_version()}, {platform.platform()}"
    yield _found("baton", text, problem="" if linux else "only Linux is served", fails=True)
    names, missing = [], []
    for name in _PACKAGES:
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    problem = f"not installed: {', '.join(missing)}" if missing else ""
    yield _found("packages", ", ".join(names), problem=problem, fails=True)


def _memory_and_disk() -> Iterator[Finding]:
    cores, memory = len(os.sched_getaffinity(0)), available_memory()
    problem = "" if memory >= 2 * GIB else "the smallest cluster needs about 3 GiB"
    yield _found("machine", f"{cores} cores, {memory / GIB:.1f} GiB free", problem=problem)
    for subject, path, least in (
        ("models and state", baton_home(), _MIN_DISK),
        ("temporary files", Path(tempfile.gettempdir()), GIB),
        ("shared memory", Path("/dev/shm"), _MIN_SHM),
    ):
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free
        problem = "" if free >= least else f"less than {least / GIB:.0f} GiB"
        if not os.access(path, os.W_OK):
            problem = "cannot be written"
        yield _found(subject, f"{free / GIB:.1f} GiB free at {path}", problem=problem)


def _limits() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= _MIN_FILES
    problem = "" if enough else f"4,096 connections need {_MIN_FILES}; routers will allow fewer"
    yield _found("open files", f"at most {hard}", problem=problem)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    problem = "not synchronised: times of traces and logs of several machines differ"
    known = "synchronised" if state not in (-1, _TIME_ERROR) else ""
    yield _found("clock", known, problem="" if known else problem)


def _compilers() -> Iterator[Finding]:
    cxx = shutil.which(os.environ.get("CXX") or "c++")
    problem = "" if cxx else "none: CPU workers run at half of their speed"
    yield _found("C++ compiler", cxx or "", problem=problem)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    cc = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
    needed = {"a C compiler": cc, str(header): header.is_file()}
    lacks = [name for name, has in needed.items() if not has]
    problem = f"triton, which GPUs need, lacks {' and '.join(lacks)}" if lacks else ""
    yield _found("C compiler and headers", cc or "", problem=problem)


def _gpus() -> Iterator[Finding]:
    asked = "--query-gpu=name,memory.free,driver_version"
    rows = _output("nvidia-smi", asked, "--format=csv,noheader")
    if not rows:
        yield _found("GPUs", "none (no nvidia-smi that answers); CPU configurations work")
        return
    for number, row in enumerate(rows):
        yield _found(f"GPU {number}", row)
    has_triton = importlib.util.find_spec("triton") is not None
    problem = "" if has_triton else "pip install triton"
    yield _found("triton", "installed" if has_triton else "", problem=problem)
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or "CPUs only"
        problem = "it cannot use these GPUs (driver too old, or a build for CPUs)"
        yield _found("torch", f"{torch.__version__} for CUDA {built}", problem=problem)
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield _found("torch", f"{torch.__version__} for CUDA {torch.version.cuda}, NCCL {nccl}")
    count = torch.cuda.device_count()
    apart = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    links = sum("NV" in row for row in _output("nvidia-smi", "topo", "-m"))
    text = f"{count} GPUs, " + ("joined by NVLink" if links and count > 1 else "no NVLink seen")
    problem = f"no access between {', '.join(apart)}: KV goes over NCCL there" if apart else ""
    yield _found("between GPUs", text, problem=problem)


def _ports(network: NetworkSection) -> Iterator[Finding]:
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(network, name)
        if not port:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("" if ":" in network.host else network.host, port))
                problem = ""
            except OSError as error:
                problem = error.strerror or str(error)
        yield _found(f"network.{name}", f"{network.host}:{port}", problem=problem)


def _output(*command: str) -> list[str]:
    """The lines that a command prints; none if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _software,
    _memory_and_disk,
    _limits,
    _compilers,
    _gpus,
)
