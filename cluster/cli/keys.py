"""`baton keys`: make API keys."""

from __future__ import annotations

import argparse

import yaml

from cluster.cli.console import Console
from router.auth.keys import check_name, hashed, new_key


def run(options: argparse.Namespace, console: Console) -> None:
    """Print a fresh key, which is kept nowhere, and the entry that lets it in."""
    check_name(options.name)
    key = new_key()
    entry = {"name": options.name, "hash": hashed(key)}
    if options.admin:
        entry["admin"] = True
    console.say(f"key, shown this once: {key}")
    console.say("entry of the file that router.settings.api_keys_file names, below `keys:`")
    console.say(yaml.safe_dump([entry], sort_keys=False).rstrip())
