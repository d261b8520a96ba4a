"""The command `baton`; `arguments` names the module of each subcommand, imported on use.

arguments  the parser, free of heavy imports
up         start and stop a cluster; `session` connects to it, `waiting` waits for its pools
change     give the running cluster another configuration, pool by pool
operate    status of a live cluster; scale it, change roles, drain workers
generate   generate and chat; also prints timelines
demo       model, cluster, one question, stop
bench      the load generator
models     fetch and find models
doctor     what this machine has for serving
keys       make API keys
usage      what each key has used
console    output and errors
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cluster.cli.arguments import make_parser
from cluster.cli.console import Console
from protocol.errors import BatonError, InvalidRequest, NotFound

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def run() -> NoReturn:
    """Run one command and exit without finalising the interpreter: threads of Ray may still run,
    and abort the process during finalisation."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 wrong use or config, 130 interrupted."""
    options = make_parser().parse_args(argv)
    console = Console()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the locale cannot encode
    try:
        command = importlib.import_module(f".{options.module}", __package__)
        return int(command.run(options, console) or 0)
    except BatonError as error:
        console.error(error.message)
        return EXIT_USAGE if isinstance(error, (InvalidRequest, NotFound)) else EXIT_FAILED
    except KeyboardInterrupt:
        console.error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output is gone; prevent a second error when it is flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except UnicodeError as error:
        console.error(f"text must be UTF-8: {error}")
        return EXIT_USAGE
    except OSError as error:
        console.error(str(error))
        return EXIT_FAILED
