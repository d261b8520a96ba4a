"""`baton drain`: take one worker out of service; Serve puts a fresh one in its place."""

from __future__ import annotations

import argparse
import asyncio

from cluster.cli import session
from cluster.cli.console import Console


def run(options: argparse.Namespace, console: Console) -> None:
    """Send the drain command."""
    with session.connected() as directory:
        view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        from cluster.admin import drain_worker

        member = asyncio.run(drain_worker(view, options.worker, secret=secret))
    console.say(f"{member.name} is {member.state}; it is replaced once its requests have ended")
