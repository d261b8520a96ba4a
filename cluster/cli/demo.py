"""`baton demo`: fetch the model, start a cluster, ask one question, show its timeline, stop."""

from __future__ import annotations

import argparse

from cluster.cli import session, up
from cluster.cli.console import Console
from cluster.cli.generate import open_client, show
from cluster.cli.operate import show_replicas
from cluster.local.local_ray import RunningCluster


def run(options: argparse.Namespace, console: Console) -> None:
    config = up.read_config(options, console)
    state = up.bring_up(config, options.config, console)
    try:
        up.show_endpoints(state, config, console)
        _ask(state, options, console)
        with session.connected() as directory:
            view, secret = session.ask(directory.view.remote(), directory.secret.remote())
        console.say()
        show_replicas(view, secret, console)
        console.say()
    finally:
        if not options.keep:
            up.stop(state, console, now=False)
            console.step("the cluster is down, with no process left")


def _ask(state: RunningCluster, options: argparse.Namespace, console: Console) -> None:
    console.say(f"\nquestion (over gRPC): {options.question}")
    console.write("answer: ")
    fields = {"max_tokens": options.max_tokens, "temperature": 0, "timeline": True, "timeout": 120}
    with open_client(state.grpc, options) as client:
        messages = [{"role": "user", "content": options.question}]
        show(client.generate(messages=messages, resume=False, **fields), console)
