"""`baton keys`: create API keys."""

from __future__ import annotations

import argparse

import yaml

from cluster.cli.console import Console
from router.auth.keys import check_name, hashed, new_key


def run(options: argparse.Namespace, console: Console) -> None:
    """Print a new key, which is stored nowhere, and its entry for the key file."""
    check_name(options.name)
    key = new_key()
    entry = {"name": options.name, "hash": hashed(key)}
    if options.admin:
        entry["admin"] = True
    console.say(f"key, shown only now: {key}")
    console.say("entry below `keys:` in the file that router.settings.api_keys_file names:")
    console.say(yaml.safe_dump([entry], sort_keys=False).rstrip())
