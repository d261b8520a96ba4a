"""Write docs/configuration.md and docs/metrics.md from the code (`make docs`, `--check`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from cluster.config.load import env_name
from cluster.config.schema import DERIVED, ClusterConfig
from cluster.config.tree import bare_type, bounds
from observability import metrics
from observability.metrics import Metric

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


def main(arguments: Sequence[str]) -> int:
    """Write or check both pages; 1 when a committed one is stale."""
    stale = [
        (path, text)
        for path, text in (
            (DOCS / "configuration.md", configuration()),
            (DOCS / "metrics.md", metrics_page()),
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
