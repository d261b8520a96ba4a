"""Compiles the grammars of requests off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from concurrency.threads import run_in_thread
from grammar.matcher import Matcher
from protocol.errors import InvalidRequest, Unsupported
from protocol.messages import Submit

if TYPE_CHECKING:
    from grammar.compiler import Compiler


class Grammars:
    """Compiles on one thread, so that a costly grammar delays only other new ones. Without a
    compiler every grammar is refused."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @staticmethod
    async def load(folder: Path, vocab_size: int, *, threads: int) -> Grammars:
        """For the model in `folder`, which may lack a tokenizer; llguidance may be missing, too.
        `threads` compute the masks of a step, with the priority of the calling thread."""
        if find_spec("llguidance") is None:
            return Grammars(None)
        # Only here: both need llguidance.
        from grammar.compiler import Compiler
        from grammar.vocabulary import load_vocabulary

        vocabulary = await run_in_thread(lambda: load_vocabulary(folder, vocab_size))
        compiler = None if vocabulary is None else Compiler(vocabulary, threads=threads)
        return Grammars(compiler)

    async def matcher(self, submit: Submit) -> Matcher:
        """The matcher of a request with a grammar, advanced over its output so far. Raises
        InvalidRequest when the grammar cannot be served."""
        grammar, sampling = submit.grammar, submit.sampling
        assert grammar is not None
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        if not ends:
            raise InvalidRequest("a grammar needs a token that ends the output", param="grammar")
        compiler = self._compiler
        if compiler is None:
            raise Unsupported("this worker has no tokenizer.json to read a grammar with")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: compiler.start(grammar, ends=ends, output=submit.output_ids)
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"grammar: {error.message}", param="grammar") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
