"""`baton bench`: run the checkout's load generator against a server, or a cluster made for it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

from cluster.cli import session, up
from cluster.cli.arguments import API_KEY_ENV, BENCH_OPTIONS, TLS_ENV
from cluster.cli.console import Console
from cluster.client import client_tls
from protocol.errors import Unavailable

_MODULE = "benchmarks.serve"


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure; 1 when a request failed."""
    if importlib.util.find_spec("benchmarks") is None:
        raise Unavailable(f"`baton bench` needs {_MODULE}, which only a source checkout has")
    scheme = "https" if client_tls(options) else "http"
    if options.server is None:
        return _measure(f"{scheme}://{session.running().http}", options)
    if "://" in options.server:
        return _measure(options.server, options)
    options.config = options.server
    config = up.read_config(options, console)
    state = up.bring_up(config, options.config, console)
    try:
        return _measure(f"{scheme}://{state.http}", options)
    finally:
        up.stop(state, console, now=False)


def _measure(url: str, options: argparse.Namespace) -> int:
    tls = ["--tls"] if options.tls else []
    command = [sys.executable, "-m", _MODULE, "--url", url, *tls, *load_options(options)]
    return subprocess.run(command, check=False, env=os.environ | _connection(options)).returncode


def load_options(options: argparse.Namespace) -> Iterator[str]:
    for name in BENCH_OPTIONS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None:
            yield from (f"--{name}", value)


def _connection(options: argparse.Namespace) -> dict[str, str]:
    """Key and certificates as environment variables, so that process lists do not show the key."""
    given = {API_KEY_ENV: options.api_key}
    given |= {
        f"{TLS_ENV}{name}": getattr(options, f"tls_{name.lower()}")
        for name in ("CA", "CERT", "KEY")
    }
    return {name: value for name, value in given.items() if value is not None}
