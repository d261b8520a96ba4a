"""The command line's parser. Without heavy imports, so that `baton --help` answers at once."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from cluster.bench.options import add_load, add_requests, add_results
from protocol.ids import Role

#: Environment variables of options; those of configuration fields are in cluster.config.load.
CONFIG_ENV = "BATON_CONFIG"
API_KEY_ENV = "BATON_API_KEY"
TLS_ENV = "BATON_TLS_"
#: Of the configurations that Baton ships.
DEFAULT_CONFIG = "local-cpu"
AUTOMATIC = "auto"
DEFAULT_GRPC = "127.0.0.1:9000"
DEFAULT_QUESTION = "What is the capital of France?"


def make_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; the attribute `module` names the module that runs it."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a language model with separate prefill and decode pools."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print Baton's version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_cluster_commands(commands)
    _add_client_commands(commands)
    _add_local_commands(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from router.fingerprint import baton_version

        print(f"baton {baton_version()}")
        parser.exit()


def _add_cluster_commands(commands: Any) -> None:
    up = _add(commands, "up", "start a cluster and leave it running, or change the one that is up")
    up.add_argument("config", nargs="?", **_config_options())
    _add_overrides(up)
    _add_model(up)
    text = "only say what would change in the cluster that is up"
    up.add_argument("--dry-run", action="store_true", help=text)
    text = "stay until interrupted, then stop the cluster"
    up.add_argument("--foreground", "--block", action="store_true", help=text)

    down = _add(commands, "down", "drain the cluster, then end every process of it", "up")
    down.add_argument("--now", action="store_true", help="do not wait for running requests")

    _add(commands, "status", "show pools, workers, their state, KV blocks and load", "operate")

    scale = _add(commands, "scale", "change the number of replicas of a live cluster", "operate")
    for pool in ("prefill", "decode"):
        text = f"number of {pool} replicas; auto: let an autoscaled pool follow its load again"
        scale.add_argument(f"--{pool}", type=_count_or_auto, metavar="N|auto", help=text)
    scale.add_argument("--router", type=_count, metavar="N", help="number of router replicas")
    scale.add_argument("--no-wait", action="store_true", help="do not wait for the replicas")

    role = _add(commands, "role", "give one live worker the work of another role", "operate")
    role.add_argument("worker", help="worker id, as in `baton status`")
    role.add_argument("role", choices=[each.value for each in Role])
    drain = _add(commands, "drain", "move one worker's sequences away and replace it", "operate")
    drain.add_argument("worker", help="worker id, as in `baton status`")


def _add_client_commands(commands: Any) -> None:
    generate = _add(commands, "generate", "continue a prompt, streamed over gRPC")
    generate.add_argument("prompt", help="text to continue; - reads standard input")
    generate.add_argument("--ignore-eos", action="store_true", default=None)
    _add_request(generate)

    chat = _add(commands, "chat", "chat with the model over gRPC", "generate")
    chat.add_argument("message", nargs="?", help="one question; without it, a conversation")
    chat.add_argument("--system", help="system message")
    _add_request(chat)

    bench = _add(commands, "bench", "measure a running server, or a configuration")
    bench.add_argument(
        "server",
        nargs="?",
        metavar="CONFIG|URL",
        help="a configuration to start for the run, http(s)://HOST:PORT of any OpenAI-compatible "
        "server, or grpc://HOST:PORT (default: the running cluster)",
    )
    _add_overrides(bench)
    add_connection(bench)
    add_load(bench.add_argument_group("load"))
    add_requests(bench.add_argument_group("requests"))
    group = bench.add_argument_group("results")
    add_results(group)
    group.add_argument("--hardware", default="", help="of the server, for the report")
    group.add_argument("--note", default="", help="text for the report")


def _add_local_commands(commands: Any) -> None:
    models = _add(commands, "models", "fetch and find models on this machine")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch a model, once")
    get.add_argument("name", help="from `baton models list`, or ORG/NAME[@REVISION] on the Hub")
    path = actions.add_parser("path", help="print a model's folder")
    path.add_argument("name")
    actions.add_parser("list", help="list models on this machine, and those that can be fetched")

    text = "show what this machine has for serving, and what is missing"
    doctor = _add(commands, "doctor", text)
    doctor.add_argument("config", nargs="?", help="a configuration, whose ports are looked at")

    keys = _add(commands, "keys", "create API keys")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a new key, and its entry for the key file")
    new.add_argument("name", help="name of its owner, for logs and metrics")
    new.add_argument("--admin", action="store_true", help="allow viewing and scaling the cluster")
    text = "fill a folder with an admin's key and a certificate; what is there stays"
    secure = actions.add_parser("secure", help=text)
    secure.add_argument("folder")
    text = "name or address of the front ends, besides those of this machine (repeatable)"
    secure.add_argument("--host", action="append", default=[], metavar="HOST", help=text)

    usage = _add(commands, "usage", "sum up the access log by day and API key, as CSV")
    usage.add_argument("logs", nargs="*", metavar="FILE", help="logs of routers (default: stdin)")

    text = "fetch the model, start a cluster, ask one question, show its timeline, stop"
    demo = _add(commands, "demo", text)
    demo.add_argument("--config", **_config_options())
    _add_overrides(demo)
    _add_model(demo)
    add_connection(demo)
    demo.add_argument("--question", default=DEFAULT_QUESTION)
    demo.add_argument("--max-tokens", type=_positive, default=64, metavar="N")
    demo.add_argument("--keep", action="store_true", help="leave the cluster running")


def _add(commands: Any, name: str, text: str, module: str = "") -> Any:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(module=module or name)
    return parser


def _config_options() -> dict[str, str]:
    return {
        "default": os.environ.get(CONFIG_ENV, DEFAULT_CONFIG),
        "help": "configuration: a file, or the name of a shipped one "
        f"(default: ${CONFIG_ENV} or {DEFAULT_CONFIG})",
    }


def _add_overrides(parser: Any) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field by its dotted path, e.g. --set model.dtype=float32 (repeatable)",
    )
    parser.add_argument(
        "--quantization",
        dest="overrides",
        action="append",
        type="model.quantization={}".format,
        metavar="fp8|int8|int4",
        help="quantise the weights while they load: --set model.quantization=...",
    )


def _add_model(parser: Any) -> None:
    parser.add_argument(
        "--model",
        dest="overrides",
        action="append",
        type="model.name={}".format,
        metavar="PATH_OR_NAME",
        help="a model's folder, or its name in `baton models list`: --set model.name=...",
    )


def add_connection(parser: Any) -> None:
    """Options for a router that wants a key or TLS. Defaults: $BATON_API_KEY, $BATON_TLS_*."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_ENV),
        help=f"API key (default: ${API_KEY_ENV}, which process lists do not show)",
    )
    parser.add_argument("--tls", action="store_true", help="use TLS, with the system's CAs")
    for name, text in (
        ("ca", "use TLS, with this CA"),
        ("cert", "client certificate (mutual TLS)"),
        ("key", "private key of the client certificate"),
    ):
        default = os.environ.get(f"{TLS_ENV}{name.upper()}")
        parser.add_argument(f"--tls-{name}", metavar="FILE", default=default, help=text)


def _add_request(parser: Any) -> None:
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help=f"gRPC address of a router (default: of the running cluster, or {DEFAULT_GRPC})",
    )
    add_connection(parser)
    parser.add_argument("--max-tokens", type=_positive, metavar="N")
    for name in ("temperature", "top-p", "min-p"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--top-k", type=partial(_count, minimum=-1))
    parser.add_argument("--seed", type=_count)
    parser.add_argument("--stop", action="append", metavar="TEXT")
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline in seconds")
    text = "print the request's timeline"
    parser.add_argument("--timeline", action="store_true", default=None, help=text)


def _count(text: str, minimum: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if not minimum <= value < 1 << 63:  # a request's fields have 64 bits
        raise argparse.ArgumentTypeError(f"must be between {minimum} and 2^63 - 1: {value}")
    return value


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTOMATIC else _count(text)


_positive = partial(_count, minimum=1)
