"""The formats that models write tool calls in."""

from __future__ import annotations

from enum import StrEnum

PYTHON_TAG = "<|python_tag|>"
_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)


class ToolFormat(StrEnum):
    """Formats of tool calls, named after the models that introduced them.

    HERMES: each call is JSON between `<tool_call>` and `</tool_call>`, anywhere in the text.
    QWEN_XML: the same marks around `<function=name>` and a `<parameter=name>` for each argument.
    LLAMA: the whole text is JSON with `parameters`, several separated by semicolons, perhaps after
    `<|python_tag|>`. PYTHONIC: the whole text is a list of calls as in Python. MISTRAL:
    `[TOOL_CALLS]`, then an array of calls; MISTRAL_NAMED: then a name, `[ARGS]` and the arguments,
    for each call. PHI4 and GRANITE: `<|tool_call|>` and an array. DEEPSEEK and DEEPSEEK_V31: marks
    around each call, the arguments with and without a code fence. HARMONY: a message of the
    channel `commentary` to the function. GEMMA: `call:name{key:value}` between marks.

    Calls are JSON with `arguments` where nothing else is said.
    """

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"
    LLAMA = "llama"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    MISTRAL_NAMED = "mistral_named"
    PHI4 = "phi4"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"
    DEEPSEEK_V31 = "deepseek_v31"
    HARMONY = "harmony"
    GEMMA = "gemma"

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a call within text; none where a call is the whole text."""
        return _BEGINS[self]

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that calls have, which may be special tokens."""
        return _MARKS[self]

    @property
    def ornaments(self) -> tuple[str, ...]:
        """Marks around calls that are never part of the text."""
        return _ORNAMENTS.get(self, ())

    @property
    def whole_text(self) -> bool:
        """Whether a call can only begin where the text does."""
        return self in (ToolFormat.LLAMA, ToolFormat.PYTHONIC)


_BEGINS = {
    ToolFormat.HERMES: ("<tool_call>",),
    ToolFormat.QWEN_XML: ("<tool_call>", "<function="),
    ToolFormat.LLAMA: (),
    ToolFormat.PYTHONIC: (),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.MISTRAL_NAMED: ("[TOOL_CALLS]",),
    ToolFormat.PHI4: ("<|tool_call|>", "functools"),
    ToolFormat.GRANITE: ("<|tool_call|>", "<tool_call>"),
    ToolFormat.DEEPSEEK: ("<｜tool▁call▁begin｜>",),
    ToolFormat.DEEPSEEK_V31: ("<｜tool▁call▁begin｜>",),
    ToolFormat.HARMONY: ("<|channel|>", "<|start|>"),
    ToolFormat.GEMMA: ("<start_function_call>",),
}
_MARKS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN_XML: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA: (PYTHON_TAG,),
    ToolFormat.PYTHONIC: (PYTHON_TAG, "<|python_start|>", "<|python_end|>"),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolFormat.MISTRAL_NAMED: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolFormat.PHI4: ("<|tool_call|>", "<|/tool_call|>"),
    ToolFormat.GRANITE: ("<|tool_call|>", "<tool_call>"),
    ToolFormat.DEEPSEEK: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.HARMONY: (
        *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    ToolFormat.GEMMA: ("<start_function_call>", "<end_function_call>", "<escape>"),
}
_ORNAMENTS = {
    ToolFormat.PYTHONIC: ("<|python_end|>",),
    ToolFormat.PHI4: ("<|/tool_call|>",),
    ToolFormat.DEEPSEEK: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ToolFormat.DEEPSEEK_V31: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ToolFormat.HARMONY: ("<|end|>", "<|call|>", "<|return|>"),
}


def detect_format(template: str) -> ToolFormat | None:
    """The format in which a chat template renders calls; None when unknown."""
    for marks, tool_format in _SIGNS:
        if all(mark in template for mark in marks):
            return tool_format
    return None


#: What only the templates of a format contain; the first that fits counts.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>"), ToolFormat.HARMONY),
    (("<｜tool▁call▁begin｜>", "```json"), ToolFormat.DEEPSEEK),
    (("<｜tool▁call▁begin｜>",), ToolFormat.DEEPSEEK_V31),
    (("<start_function_call>",), ToolFormat.GEMMA),
    (("<function=", "<parameter="), ToolFormat.QWEN_XML),
    (("[TOOL_CALLS]", "[ARGS]"), ToolFormat.MISTRAL_NAMED),
    (("[TOOL_CALLS]",), ToolFormat.MISTRAL),
    (("<|/tool_call|>",), ToolFormat.PHI4),
    (("<|/tool|>",), ToolFormat.PHI4),
    (("functools",), ToolFormat.PHI4),
    (("<|tool_call|>",), ToolFormat.GRANITE),
    (("<tool_call>",), ToolFormat.HERMES),
    (("<|python_start|>",), ToolFormat.PYTHONIC),
    (("[func_name1(",), ToolFormat.PYTHONIC),
    ((PYTHON_TAG,), ToolFormat.LLAMA),
    (("ipython",), ToolFormat.LLAMA),
)
