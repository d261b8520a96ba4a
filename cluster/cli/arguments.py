"""The command line's shape. Kept free of heavy imports: `baton --help` answers at once."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

#: Environment twins of flags; BATON_* twins of configuration fields are in cluster.config.load.
CONFIG_ENV = "BATON_CONFIG"
DEFAULT_CONFIG = "deploy/configs/local-cpu.yaml"
API_KEY_ENV = "BATON_API_KEY"
TLS_ENV = "BATON_TLS_"
DEFAULT_GRPC = "127.0.0.1:9000"
DEFAULT_QUESTION = "What is the capital of France?"


#: Options of the load generator that `baton bench` hands on, with what they mean.
BENCH_OPTIONS = {
    "concurrency": "clients of each run, e.g. 1,4,16",
    "prompt-tokens": "tokens of a prompt; clips those of a trace",
    "output-tokens": "tokens of an output; clips those of a trace",
    "requests": "requests of a run",
    "repeats": "runs of each number of clients",
    "vocab-size": "prompts are random token ids below this",
    "trace": "arrivals from a file instead of clients in a loop",
    "speed": "replay the trace this much faster",
    "limit": "requests of the trace",
    "slo-ttft": "for goodput: seconds to the first token",
    "slo-tpot": "for goodput: seconds a token after it",
    "theme": "write a report of this name under benchmarks/results",
    "note": "for the report",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; `module` names the one that runs it."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a language model with separate prefill and decode pools."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _up(commands)
    _down(commands)
    _plain(commands, "status", "pools, workers, their state, KV blocks and load")
    _scale(commands)
    _drain(commands)
    _generate(commands)
    _chat(commands)
    _bench(commands)
    _models(commands)
    _keys(commands)
    _demo(commands)
    return parser


def _plain(commands: Any, name: str, text: str, module: str | None = None) -> Any:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(module=module or name)
    return parser


def _config(parser: Any, *, positional: bool) -> None:
    default = os.environ.get(CONFIG_ENV, DEFAULT_CONFIG)
    text = f"configuration file (default: ${CONFIG_ENV} or {DEFAULT_CONFIG})"
    if positional:
        parser.add_argument("config", nargs="?", default=default, help=text)
    else:
        parser.add_argument("--config", default=default, help=text)
    _overrides(parser)


def _overrides(parser: Any) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override one field by its dotted path, e.g. --set model.dtype=float32 (repeatable)",
    )


def _up(commands: Any) -> None:
    parser = _plain(commands, "up", "start a cluster and keep it up")
    _config(parser, positional=True)
    parser.add_argument(
        "--foreground",
        "--block",
        action="store_true",
        help="stay until interrupted, then stop the cluster",
    )


def _down(commands: Any) -> None:
    parser = _plain(commands, "down", "stop the cluster: drain it, then end every process")
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")


def _scale(commands: Any) -> None:
    text = "change the number of replicas of a live cluster"
    parser = _plain(commands, "scale", text, module="operate")
    parser.add_argument("--prefill", type=_count, metavar="N", help="prefill replicas wanted")
    parser.add_argument("--decode", type=_count, metavar="M", help="decode replicas wanted")
    parser.add_argument("--router", type=_count, metavar="R", help="router replicas wanted")
    parser.add_argument("--no-wait", action="store_true", help="return at once")


def _drain(commands: Any) -> None:
    text = "let one worker finish its requests and be replaced by a fresh one"
    parser = _plain(commands, "drain", text, module="operate")
    parser.add_argument("worker", help="worker id, as `baton status` shows it")


def add_connection(parser: Any) -> None:
    """How to call a router that asks for a key or speaks TLS. Twins: BATON_API_KEY, BATON_TLS_*."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_ENV),
        help=f"key to call with (default: ${API_KEY_ENV}, which no process list shows)",
    )
    parser.add_argument("--tls", action="store_true", help="call over TLS, trusting the usual CAs")
    for name, text in (
        ("ca", "call over TLS, trusting this CA"),
        ("cert", "certificate to show (mutual TLS)"),
        ("key", "its private key"),
    ):
        default = os.environ.get(f"{TLS_ENV}{name.upper()}")
        parser.add_argument(f"--tls-{name}", metavar="FILE", default=default, help=text)


def _target(parser: Any) -> None:
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help=f"gRPC address of a router (default: the running cluster's, or {DEFAULT_GRPC})",
    )
    add_connection(parser)
    parser.add_argument("--max-tokens", type=_positive, metavar="N")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=partial(_count, least=-1))
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=_count)
    parser.add_argument("--stop", action="append", metavar="TEXT")
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline in seconds")
    parser.add_argument(
        "--timeline", action="store_true", default=None, help="print where the time went"
    )


def _generate(commands: Any) -> None:
    parser = _plain(commands, "generate", "continue a prompt, streamed over gRPC")
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    _target(parser)


def _chat(commands: Any) -> None:
    parser = _plain(commands, "chat", "talk to the model, streamed over gRPC", module="generate")
    parser.add_argument("message", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--system", help="system message")
    _target(parser)


def _bench(commands: Any) -> None:
    parser = _plain(commands, "bench", "measure a running server, or a configuration")
    parser.add_argument(
        "server",
        nargs="?",
        metavar="CONFIG|URL",
        help="a configuration to bring up for it, http(s)://HOST:PORT of any OpenAI server, or "
        "grpc://HOST:PORT (default: the running cluster)",
    )
    _overrides(parser)
    add_connection(parser)
    for name, text in BENCH_OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="X", help=text)


def _models(commands: Any) -> None:
    parser = _plain(commands, "models", "fetch and find models on this machine")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch and convert a model, once")
    get.add_argument("name")
    path = actions.add_parser("path", help="print a model's folder")
    path.add_argument("name")
    actions.add_parser("list", help="models on this machine, and those that can be fetched")


def _keys(commands: Any) -> None:
    parser = _plain(commands, "keys", "make API keys for the front doors")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a fresh key, and its entry for the key file")
    new.add_argument("name", help="who it is for; shown in logs and metrics")
    new.add_argument("--admin", action="store_true", help="may see and steer the cluster")


def _demo(commands: Any) -> None:
    parser = _plain(
        commands, "demo", "fetch the model, start a cluster, ask one question, show it, stop"
    )
    _config(parser, positional=False)
    add_connection(parser)
    parser.add_argument("--question", default=DEFAULT_QUESTION)
    parser.add_argument("--max-tokens", type=_positive, default=64, metavar="N")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")


def _count(text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if not least <= value < 1 << 63:  # as wide as the fields of a request
        raise argparse.ArgumentTypeError(f"must be between {least} and 2^63 - 1: {value}")
    return value


_positive = partial(_count, least=1)
