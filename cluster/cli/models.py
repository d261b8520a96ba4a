"""`baton models get|path|list`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.cli.console import Console
from cluster.local.paths import models_dir
from cluster.models.gguf import SOURCES
from cluster.models.store import find_model, get_model, list_models


def run(options: argparse.Namespace, console: Console) -> None:
    if options.action == "get":
        console.say(str(get_model(options.name)))
    elif options.action == "path":
        console.say(str(find_model(options.name)))
    else:
        _list(console)


def _list(console: Console) -> None:
    found = {str(path.relative_to(models_dir())): path for path in list_models()}
    rows = [(name, _size(path), str(path)) for name, path in found.items()]
    rows += [(name, "-", "baton models get " + name) for name in SOURCES if name not in found]
    console.table(("NAME", "SIZE", "WHERE"), rows)


def _size(folder: Path) -> str:
    num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return f"{num_bytes / 1e6:.0f} MB"
