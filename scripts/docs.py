"""Write docs/configuration.md, docs/metrics.md and the table of fields in docs/api.md from the code
(`make docs`, `--check`)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.load import bare_type, bounds, env_name
from cluster.config.schema import DERIVED, ClusterConfig
from observability import metrics
from observability.metrics import Metric
from router.request.body import HARMLESS, HINTS, UNSERVED
from router.request.endpoints import ChatRequest, CompletionRequest
from router.request.generate_request import GenerateRequest

DOCS = Path(__file__).resolve().parent.parent / "docs"
MAX_COLUMNS = 110
_MADE = "<!-- Made by `make docs` from the code; do not edit. -->\n\n"
_CONFIGURATION = """\
# Configuration

One YAML file describes a cluster: `baton up FILE`. Every field has a dotted path, which is also its
name for `--set PATH=VALUE` and, in capitals with `BATON_` in front, its environment variable:

```
baton up deploy/configs/local-cpu.yaml --set model.dtype=float32
BATON_DECODE_REPLICAS=2 baton up deploy/configs/local-cpu.yaml
```

The file is read first, then the environment, then `--set`. Unknown names, wrong types, values out
of range and sections that do not fit each other are refused before anything starts, with the field
named.

"""
_METRICS = """\
# Metrics

Each router serves Prometheus text at `/metrics`: its own figures and those of every worker it
knows. Names carry the prefix `baton_` and the label `model_name`. Those marked *vLLM* have vLLM's
name and are exported as `vllm:...` too when `router.settings.vllm_metric_names` is on.

"""


def configuration() -> str:
    """The page of every field."""
    return _MADE + _CONFIGURATION + "".join(_sections(ClusterConfig, ())).rstrip() + "\n"


def _sections(cls: type, path: tuple[str, ...]) -> Iterator[str]:
    """This section's table, then those of its sections. Both pools share one table."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [f for f in dataclasses.fields(cls) if (cls, f.name) not in DERIVED]
    plain = [f for f in fields if not dataclasses.is_dataclass(hints[f.name])]
    if path:
        yield f"## {_title(path)}\n\n{_prose(cls)}\n\n"
    if plain:
        yield "| field | type | default |\n| --- | --- | --- |\n"
        for one in plain:
            yield f"| `{one.name}` | {_type(hints[one.name])} | {_default(one)} |\n"
        example = ".".join((*path, plain[0].name))
        yield f"\nFor example `{example}`, `{env_name(example)}`.\n\n"
    for one in fields:
        if dataclasses.is_dataclass(hints[one.name]) and (*path, one.name) != ("decode",):
            yield from _sections(hints[one.name], (*path, one.name))


def _title(path: tuple[str, ...]) -> str:
    dotted = ".".join(path)
    if path[0] != "prefill":
        return f"`{dotted}`"
    return f"`{dotted}` and `{'.'.join(('decode', *path[1:]))}`"


def _prose(cls: type) -> str:
    """A class's docstring; the parts `field: meaning` of it become a list."""
    first, *rest = (inspect.getdoc(cls) or "").split("\n\n")
    names = "|".join(field.name for field in dataclasses.fields(cls))
    parts = [" ".join(first.split())]
    for paragraph in rest:
        text = re.sub(
            rf"(?:^|(?<=[.;]) )(?=(?:{names})(?:, (?:{names}))*: )",
            "\n",
            " ".join(paragraph.split()),
        )
        parts.append("\n".join(_listed(cls, line) for line in text.strip().split("\n")))
    lines = "\n\n".join(part for part in parts if part).split("\n")
    return "\n".join(_wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line,
        MAX_COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _listed(cls: type, line: str) -> str:
    heading, colon, meaning = line.partition(": ")
    names = heading.split(", ")
    if not colon or any(" " in name for name in names):
        return line
    shown = ", ".join(f"`{name}`" for name in names)
    source = DERIVED.get((cls, names[0]))
    if source is not None:
        meaning = f"set by the pool's `{source[1:]}`" if source[0] == "." else f"set by `{source}`"
    return f"- {shown}: {meaning}"


def _type(kind: Any) -> str:
    """A field's type in words, with its bounds."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return f"{_type(arguments[0])}; or None"
    if origin is dict:
        return f"map of {_type(arguments[1])}"
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    bare = bare_type(kind)
    if issubclass(bare, Enum):
        return "one of " + ", ".join(f"`{member.value}`" for member in bare)
    return f"{bare.__name__}{bounds(kind)}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default
    shown = value.value if isinstance(value, Enum) else value
    return "empty" if shown in ("", ()) else f"`{shown}`"


def metrics_page() -> str:
    """The page of every metric."""
    groups = (
        ("Requests and hand-offs, as a router sees them", metrics.REQUEST_METRICS),
        ("Workers, now", metrics.WORKER_GAUGES),
        (
            "Workers, since they started (labels `role` and `worker` besides)",
            metrics.WORKER_COUNTERS,
        ),
    )
    head = "| name | kind | labels | meaning | |\n| --- | --- | --- | --- | --- |\n"
    tables = (f"## {title}\n\n{head}{''.join(map(_metric, group))}" for title, group in groups)
    return _MADE + _METRICS + "\n".join(tables)


def _metric(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    vllm = "vLLM" if metric.vllm else ""
    return f"| `baton_{metric.name}` | {metric.kind} | {labels} | {metric.help} | {vllm} |\n"


def api_page() -> str:
    """docs/api.md with the table of a request's fields between its markers."""
    before, _, rest = (DOCS / "api.md").read_text().partition(_FIELDS_BEGIN)
    _, _, after = rest.partition(_FIELDS_END)
    rows = [
        _field_row(kind, names, meaning)
        for kind in (GenerateRequest, ChatRequest, CompletionRequest)
        for names, meaning in _meanings(kind)
    ]
    head = "\n\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
    unserved, hints, harmless = (
        ", ".join(f"`{name}`" for name in names) for names in (UNSERVED, HINTS, sorted(HARMLESS))
    )
    lists = (
        _wrapped(f"Known but not served, refused by name unless neutral: {unserved}."),
        _wrapped(f"Without effect here: {hints}; labels: {harmless}."),
    )
    table = head + "".join(rows) + "\n" + "\n\n".join(lists) + "\n\n"
    return before + _FIELDS_BEGIN + table + _FIELDS_END + after


_FIELDS_BEGIN = "<!-- fields: made by `make docs` from router/request; do not edit -->"
_FIELDS_END = "<!-- end of fields -->"


def _meanings(kind: type[GenerateRequest]) -> Iterator[tuple[list[str], str]]:
    """The names and the meaning of each entry `names: meaning` in a docstring."""
    entries = re.split(r"\n(?=\S)", inspect.getdoc(kind) or "")
    found = [entry for entry in entries if re.match(r"(\w+, )*\w+: ", entry)]
    described: list[str] = []
    for entry in found:
        heading, _, meaning = entry.partition(": ")
        described += heading.split(", ")
        yield heading.split(", "), " ".join(meaning.split()).removesuffix(".")
    own = [name for name in kind.__struct_fields__ if name in kind.__annotations__]
    missing = set(own) - {"kind", "logprobs"} - set(described)
    if missing:
        raise ValueError(f"{kind.__name__} has no meaning of {', '.join(sorted(missing))}")


def _field_row(kind: type[GenerateRequest], names: list[str], meaning: str) -> str:
    of_kind = kind if kind is not GenerateRequest else CompletionRequest
    _, schemas = msgspec.json.schema_components([of_kind])
    schema = schemas[of_kind.__name__]
    fields = [schema["properties"][name] for name in names]
    kinds = dict.fromkeys(_schema_words(field) for field in fields)
    defaults = dict.fromkeys(_schema_default(field) for field in fields)
    required = names[0] in schema["required"]
    place = {ChatRequest: "chat: ", CompletionRequest: "completions: "}.get(of_kind, "")
    return (
        f"| {', '.join(f'`{name}`' for name in names)} | {'; '.join(kinds)} "
        f"| {'required' if required else ', '.join(defaults)} "
        f"| {'' if kind is GenerateRequest else place}{meaning} |\n"
    )


def _schema_words(schema: dict[str, Any]) -> str:
    """What a JSON Schema allows, in words; null, which means unset, is left out."""
    if "anyOf" in schema:
        words = [_schema_words(one) for one in schema["anyOf"]]
        return " or ".join(dict.fromkeys(word for word in words if word != "null"))
    if "$ref" in schema:
        return "object"
    kind = schema.get("type", "any")
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        kind += f" above {schema['exclusiveMinimum']}"
    if kind == "string" and "maxLength" in schema:
        low, high, kind = schema["minLength"], schema["maxLength"], "string of length"
    if kind == "array":
        size = f" of up to {schema['maxItems']}" if "maxItems" in schema else ""
        return f"array{size} ({_schema_words(schema['items'])})"
    if kind == "object" and "maxProperties" in schema:
        values = _schema_words(schema["additionalProperties"])
        return f"object of up to {schema['maxProperties']} ({values})"
    return kind + _range(low, high)


def _range(low: float | None, high: float | None) -> str:
    powers = {2**63 - 1: "2^63 - 1", 2**31 - 1: "2^31 - 1"}
    low_text, high_text = (powers.get(bound, f"{bound}") for bound in (low, high))  # type: ignore[call-overload]
    if low == -(2**63) + 1 or (low is None and high is None):
        return ""
    if low is None:
        return f" up to {high_text}"
    return f" {low_text} to {high_text}" if high is not None else f" from {low_text}"


def _schema_default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return json.dumps(default) if isinstance(default, bool | int | float) else ""


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; 1 when a committed one is stale."""
    stale = [
        (path, text)
        for path, text in (
            (DOCS / "configuration.md", configuration()),
            (DOCS / "metrics.md", metrics_page()),
            (DOCS / "api.md", api_page()),
        )
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        sys.stderr.write(f"{'stale' if '--check' in arguments else 'wrote'}: {path.name}\n")
        if "--check" not in arguments:
            path.write_text(text)
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
