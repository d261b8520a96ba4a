"""`baton bench`: load a server, or a cluster made for it, and measure."""

from __future__ import annotations

import argparse
import sys

from cluster.bench import output
from cluster.cli import session, up
from cluster.cli.console import Console
from cluster.client_tls import client_tls


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure; 1 when a request failed."""
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
    options.url = url
    return output.run(options, sys.argv[1:])
