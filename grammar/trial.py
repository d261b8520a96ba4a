"""Compiles new grammars in a process of their own, before a request with one is accepted.

No limit on the source covers every cost: a chain of some thousand rules overflows the library's
stack, `multipleOf: 999983` takes seconds and hundreds of MB. Either ends the trial process only,
and the grammar is refused.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from concurrency.bounded_map import BoundedMap
from grammar.bounds import check_length
from grammar.matcher import Matcher, compute_masks
from protocol.errors import InvalidRequest, Unavailable
from protocol.sampling import Grammar, GrammarKind

CPU_S = 1.0
#: On a busy machine.
_WALL_S = 20.0
_MEMORY_BYTES = 2 << 30
#: Threads of workers have at least twice as much, so a grammar that passes cannot overflow theirs.
_STACK_BYTES = 1 << 20
_MAX_VERDICTS = 1024
#: Tokens of an output that are tried.
_STEPS = 32
_SPACE = 0x20
_MAX_MESSAGE_CHARS = 2000


class Trial:
    """Checks that grammars compile. Its process starts with the first grammar, and again after one
    that ended it. `check` is called by one thread."""

    def __init__(self, special_tokens: Mapping[int, str], *, cpu_s: float = CPU_S) -> None:
        """`special_tokens` are the model's, by id; `cpu_s` limits the time of one grammar."""
        self._start = {"special": list(special_tokens.items()), "cpu_s": cpu_s}
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: BoundedMap[int, str] = BoundedMap(_MAX_VERDICTS)  # "" for a good one

    def check(self, grammar: Grammar) -> None:
        """Return when the grammar compiles; blocks. Raises InvalidRequest when it does not, and
        Unavailable when the process does not answer in time."""
        check_length(grammar)
        if self.known(grammar):
            return
        verdict = self._ask(grammar)
        self._verdicts.put(hash(grammar), verdict)
        if verdict:
            raise InvalidRequest(verdict)

    def known(self, grammar: Grammar) -> bool:
        """Whether the grammar has passed before; raises as `check` if it has failed. From any
        thread, without blocking."""
        verdict = self._verdicts.get(hash(grammar))
        if verdict:
            raise InvalidRequest(verdict)
        return verdict is not None

    def begin(self) -> None:
        """Start the process ahead of the first grammar: that takes a second of computing."""
        self._running()

    def close(self) -> None:
        """End the process. Idempotent; from any thread."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, grammar: Grammar) -> str:
        process = self._running()
        _tell(process, [grammar.kind.value, grammar.source])
        answer = _answer(process)
        if answer:
            verdict: str = json.loads(answer)
            return verdict
        if _end(process) in (-signal.SIGPROF, -signal.SIGKILL):
            return f"takes more than {self._cpu_s:g} s to compile"
        return "too large or too deep to compile"

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = _spawn()
            _tell(process, self._start)
        return process


def _spawn() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _tell(process: subprocess.Popen[bytes], value: object) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # there will be no answer


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """The line that the process answers; empty when it ended instead. Raises Unavailable when it
    does not answer in time, which says nothing about the grammar."""
    assert process.stdout is not None
    waiting = select.poll()
    waiting.register(process.stdout, select.POLLIN)
    if not waiting.poll(_WALL_S * 1000):
        _end(process)
        raise Unavailable(f"the grammar could not be tried within {_WALL_S:g} s", retry_after_s=1.0)
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()


def _serve() -> None:
    """Main loop of the process: a grammar per line in, a verdict per line out, until the parent is
    gone."""
    from grammar.compiler import Compiler  # only this process needs the library
    from grammar.vocabulary import byte_vocabulary

    start = json.loads(sys.stdin.readline())
    vocabulary = byte_vocabulary({int(token): text for token, text in start["special"]})
    for line in sys.stdin:
        kind, source = json.loads(line)
        # A new compiler, so that one grammar's memory is gone before the next.
        compiler, verdict = Compiler(vocabulary), ""
        signal.setitimer(signal.ITIMER_PROF, start["cpu_s"])  # its signal ends the process
        try:
            grammar, end = Grammar(kind=GrammarKind(kind), source=source), vocabulary.eos_token
            _follow(compiler.start(grammar, ends=[end]), end)
        except InvalidRequest as error:
            verdict = error.message[:_MAX_MESSAGE_CHARS]
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


def _follow(matcher: Matcher, end: int) -> None:
    """Go some tokens into the grammar: a grammar that is too wide (an object of 3,000 optional
    properties) fails only behind its first character. Raises InvalidRequest."""
    for _ in range(_STEPS):
        allowed = int.from_bytes(matcher.mask or b"", "little") & ~(1 << end)
        # Line breaks between parts of JSON would lead nowhere.
        allowed = allowed >> _SPACE << _SPACE or allowed
        if not allowed:
            return
        matcher.take([(allowed & -allowed).bit_length() - 1])
        compute_masks([matcher])
        if matcher.state.is_error():
            raise InvalidRequest(matcher.error)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()
