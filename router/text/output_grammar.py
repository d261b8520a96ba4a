"""The grammar that a request's output must follow, checked before any worker is asked."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from grammar.trial import Trial
from protocol.errors import InvalidRequest, Unsupported
from protocol.sampling import Grammar, GrammarKind
from router.request.generate_request import GenerateRequest
from router.request.structured_output import StructuredOutput
from router.request.tools import ToolChoice, ToolUse
from router.text.tokenizer import ModelText
from router.text.tool_formats import ToolFormat, call_grammar
from router.text.tool_parser import CallParser


class OutputGrammars:
    """Grammars of one model's requests. Each is checked before a request relies on it, in a process
    of its own, off the event loop (grammar.trial)."""

    def __init__(self, text: ModelText) -> None:
        self._chat = text.chat
        self._has_end = bool(text.eos_ids)
        # Grammars treat all added tokens as special.
        self._special_ids = {token: i for i, token in text.added_tokens.items()}
        self._trial = Trial(text.added_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def tool_format(self, request: GenerateRequest) -> ToolFormat | None:
        """How calls in the output are written; None without tools. Raises Unsupported when the
        model takes no tools."""
        return None if request.tool_use is None else self._chat.require_tools()

    async def grammar(self, request: GenerateRequest) -> Grammar | None:
        """The grammar of the output, if it has one. Raises InvalidRequest naming the field whose
        grammar is not possible."""
        tool_format = self.tool_format(request)
        forced = request.tool_use is not None and request.tool_use.choice is not ToolChoice.AUTO
        if request.structured is None and not forced:
            return None
        if not self._has_end:
            param = "tool_choice" if request.structured is None else request.structured.param
            raise Unsupported(f"{param}: this model has no end token", param=param)
        requested, tools = request.structured, request.tool_use
        if requested is not None:
            await self._check(requested.grammar, requested.param)
        if tools is None or tool_format is None:
            return None if requested is None else requested.grammar
        for i, tool in enumerate(tools.tools):
            if tool in tools.callable_tools:
                schema = Grammar(kind=GrammarKind.JSON_SCHEMA, source=tool.schema)
                await self._check(schema, f"tools[{i}].function.parameters")
        grammar = await asyncio.to_thread(self._with_calls, requested, tools, tool_format)
        await self._check(grammar, "tools")
        return grammar

    def call_parser(self, request: GenerateRequest) -> CallParser | None:
        """A fresh reader of the calls in one output; None without tools."""
        tools, tool_format = request.tool_use, self.tool_format(request)
        if tools is None or tool_format is None:
            return None
        names = {tool.name for tool in tools.callable_tools}
        several = tools.parallel and tools.choice is not ToolChoice.NAMED
        forced = tools.choice is not ToolChoice.AUTO
        return CallParser(tool_format, names, several=several, forced=forced)

    def named(self, error: InvalidRequest, request: GenerateRequest) -> InvalidRequest:
        """A worker's error about the grammar, naming the request's field instead."""
        if error.param != "grammar":
            return error
        param = "tools" if request.structured is None else request.structured.param
        return InvalidRequest(f"{param}: {error.message.removeprefix('grammar: ')}", param=param)

    def begin(self) -> None:
        """Start the checking process before the first grammar."""
        self._thread.submit(self._trial.begin)

    def close(self) -> None:
        """End the thread and the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _with_calls(
        self, requested: StructuredOutput | None, tools: ToolUse, tool_format: ToolFormat
    ) -> Grammar:
        source = call_grammar(
            tool_format,
            tools.callable_tools,
            several=tools.parallel and tools.choice is not ToolChoice.NAMED,
            answer=_answer(requested, tools),
            special_id=self._special_ids.get,
        )
        return Grammar(kind=GrammarKind.LARK, source=source)

    async def _check(self, grammar: Grammar, param: str) -> None:
        """Unknown grammars are checked one at a time."""
        try:
            if not self._trial.known(grammar):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._trial.check, grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param=param) from None


def _answer(requested: StructuredOutput | None, tools: ToolUse) -> str | None:
    """The schema of an answer that the model may give instead of calls."""
    if requested is None or tools.choice is not ToolChoice.AUTO:
        return None
    if requested.grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"{requested.param} cannot be combined with tools; set tool_choice to none or required",
            param=requested.param,
        )
    return requested.grammar.source
