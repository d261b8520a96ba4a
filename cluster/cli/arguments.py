"""The command line's parser. Without heavy imports, so that `baton --help` answers at once."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

#: Environment variables of options; those of configuration fields are in cluster.config.load.
CONFIG_ENV = "BATON_CONFIG"
API_KEY_ENV = "BATON_API_KEY"
TLS_ENV = "BATON_TLS_"
DEFAULT_CONFIG = "deploy/configs/local-cpu.yaml"
DEFAULT_GRPC = "127.0.0.1:9000"
DEFAULT_QUESTION = "What is the capital of France?"

#: Options that `baton bench` passes to the load generator.
BENCH_OPTIONS = {
    "concurrency": "concurrent clients of each run, e.g. 1,4,16",
    "prompt-tokens": "tokens per prompt; the maximum for prompts of a trace",
    "output-tokens": "tokens per output; the maximum for outputs of a trace",
    "requests": "requests per run",
    "repeats": "runs for each number of clients",
    "vocab-size": "prompts are random token ids below this",
    "trace": "file of arrivals to replay, in place of closed-loop clients",
    "speed": "factor by which the trace is replayed faster",
    "limit": "number of requests of the trace",
    "slo-ttft": "for goodput: maximum seconds to the first token",
    "slo-tpot": "for goodput: maximum seconds per token after the first",
    "theme": "write a report of this name under benchmarks/results",
    "note": "text for the report",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; the attribute `module` names the module that runs it."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a language model with separate prefill and decode pools."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _up(commands)
    _down(commands)
    _command(commands, "status", "show pools, workers, their state, KV blocks and load")
    _scale(commands)
    _drain(commands)
    _generate(commands)
    _chat(commands)
    _bench(commands)
    _models(commands)
    _keys(commands)
    _demo(commands)
    return parser


def _command(commands: Any, name: str, text: str, module: str | None = None) -> Any:
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
        help="override a field by its dotted path, e.g. --set model.dtype=float32 (repeatable)",
    )


def _up(commands: Any) -> None:
    parser = _command(commands, "up", "start a cluster and leave it running")
    _config(parser, positional=True)
    parser.add_argument(
        "--foreground",
        "--block",
        action="store_true",
        help="stay until interrupted, then stop the cluster",
    )


def _down(commands: Any) -> None:
    parser = _command(commands, "down", "drain the cluster, then end every process of it")
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")


def _scale(commands: Any) -> None:
    text = "change the number of replicas of a live cluster"
    parser = _command(commands, "scale", text, module="operate")
    parser.add_argument("--prefill", type=_count, metavar="N", help="number of prefill replicas")
    parser.add_argument("--decode", type=_count, metavar="M", help="number of decode replicas")
    parser.add_argument("--router", type=_count, metavar="R", help="number of router replicas")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the replicas")


def _drain(commands: Any) -> None:
    text = "let one worker finish its requests, then replace it"
    parser = _command(commands, "drain", text, module="operate")
    parser.add_argument("worker", help="worker id, as in `baton status`")


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


def _sampling(parser: Any) -> None:
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help=f"gRPC address of a router (default: of the running cluster, or {DEFAULT_GRPC})",
    )
    add_connection(parser)
    parser.add_argument("--max-tokens", type=_positive, metavar="N")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=partial(_count, minimum=-1))
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=_count)
    parser.add_argument("--stop", action="append", metavar="TEXT")
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline in seconds")
    parser.add_argument(
        "--timeline", action="store_true", default=None, help="print the request's timeline"
    )


def _generate(commands: Any) -> None:
    parser = _command(commands, "generate", "continue a prompt, streamed over gRPC")
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    _sampling(parser)


def _chat(commands: Any) -> None:
    parser = _command(commands, "chat", "chat with the model over gRPC", module="generate")
    parser.add_argument("message", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--system", help="system message")
    _sampling(parser)


def _bench(commands: Any) -> None:
    parser = _command(commands, "bench", "measure a running server, or a configuration")
    parser.add_argument(
        "server",
        nargs="?",
        metavar="CONFIG|URL",
        help="a configuration to start for the run, http(s)://HOST:PORT of any OpenAI-compatible "
        "server, or grpc://HOST:PORT (default: the running cluster)",
    )
    _overrides(parser)
    add_connection(parser)
    for name, text in BENCH_OPTIONS.items():
        parser.add_argument(f"--{name}", metavar="X", help=text)


def _models(commands: Any) -> None:
    parser = _command(commands, "models", "fetch and find models on this machine")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch and convert a model, once")
    get.add_argument("name")
    path = actions.add_parser("path", help="print a model's folder")
    path.add_argument("name")
    actions.add_parser("list", help="list models on this machine, and those that can be fetched")


def _keys(commands: Any) -> None:
    parser = _command(commands, "keys", "create API keys")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a new key, and its entry for the key file")
    new.add_argument("name", help="name of its owner, for logs and metrics")
    new.add_argument("--admin", action="store_true", help="allow viewing and scaling the cluster")


def _demo(commands: Any) -> None:
    text = "fetch the model, start a cluster, ask one question, show its timeline, stop"
    parser = _command(commands, "demo", text)
    _config(parser, positional=False)
    add_connection(parser)
    parser.add_argument("--question", default=DEFAULT_QUESTION)
    parser.add_argument("--max-tokens", type=_positive, default=64, metavar="N")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")


def _count(text: str, minimum: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if not minimum <= value < 1 << 63:  # a request's fields have 64 bits
        raise argparse.ArgumentTypeError(f"must be between {minimum} and 2^63 - 1: {value}")
    return value


_positive = partial(_count, minimum=1)
