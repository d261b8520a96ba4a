"""The grammars of a worker's requests, compiled off its event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from concurrency.threads import in_own_thread
from grammar.matcher import Matcher
from protocol.errors import InvalidRequest, Unsupported
from protocol.messages import Submit

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from grammar.compiler import Compiler


def _load_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer | None:
    from grammar.vocabulary import load_vocabulary

    return load_vocabulary(folder, vocab_size)


class Grammars:
    """One thread compiles, so that a costly grammar holds up only other new ones."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @staticmethod
    async def load(folder: Path, vocab_size: int, *, threads: int) -> Grammars:
        """For the model in `folder`. Without its tokenizer (or without llguidance, on a bench)
        every grammar is refused. `threads` compute the masks of a step, with the priority of this
        one."""
        if find_spec("llguidance") is None:
            return Grammars(None)
        vocabulary = await in_own_thread(lambda: _load_vocabulary(folder, vocab_size))
        if vocabulary is None:
            return Grammars(None)
        from grammar.compiler import Compiler

        return Grammars(Compiler(vocabulary, threads=threads))

    async def matcher(self, submit: Submit) -> Matcher:
        """The matcher of a request with a grammar, at the output it has so far. Raises
        InvalidRequest when there is none."""
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
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
