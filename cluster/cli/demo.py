"""`baton demo`: fetch the model, start a cluster, ask one question, show its timeline, stop."""

from __future__ import annotations

import argparse
from contextlib import closing

from cluster.cli import session, up
from cluster.cli.console import Console
from cluster.cli.generate import open_client, show
from cluster.cli.operate import show_replicas
from cluster.client import GenerateOutcome
from cluster.local.local_ray import RunningCluster
from protocol.wire.inference_pb2 import Message


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
    outcome = GenerateOutcome()
    console.say(f"\nquestion (over gRPC): {options.question}")
    console.write("answer: ")
    message = Message(role="user", content=options.question)
    fields = {"max_tokens": options.max_tokens, "temperature": 0, "timeline": True, "timeout": 120}
    with closing(open_client(state.grpc, options)) as client:
        show(client.chat([message], fields, outcome), outcome, console, timeline=True)
