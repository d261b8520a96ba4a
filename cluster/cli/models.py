"""`baton models get|path|list`."""

from __future__ import annotations

import argparse

from cluster.cli.console import Console
from cluster.models import SOURCES, find_model, get_model, list_models


def run(options: argparse.Namespace, console: Console) -> None:
    """Carry out the action."""
    if options.action == "get":
        console.say(str(get_model(options.name)))
    elif options.action == "path":
        console.say(str(find_model(options.name)))
    else:
        _list(console)


def _list(console: Console) -> None:
    found = list_models()
    rows = [(model.name, f"{model.num_bytes / 1e6:.0f} MB", str(model.path)) for model in found]
    here = {model.name for model in found}
    rows += [(name, "-", "baton models get " + name) for name in SOURCES if name not in here]
    console.table(("NAME", "SIZE", "WHERE"), rows)
