"""What this build and its model are known by."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

#: Files that decide what a router makes of a request.
_TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def text_fingerprint(folder: Path, chat_template: str) -> str:
    """OpenAI's `system_fingerprint`: another one after a change of Baton's version or of the
    model's text side."""
    digest = hashlib.sha256(baton_version().encode())
    files = [folder / name for name in (*_TEXT_FILES, "chat_template.jinja")]
    for path in [*files, *([Path(chat_template)] if chat_template else [])]:
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return f"fp_{digest.hexdigest()[:12]}"


def baton_version() -> str:
    try:
        return version("baton-llm")
    except PackageNotFoundError:
        return "unknown"


def baton_build() -> str:
    """The version and, of an installed wheel, a digest of its modules: a wheel that was built again
    keeps its version."""
    try:
        installed = files("baton-llm") or ()
    except PackageNotFoundError:
        return baton_version()
    modules = sorted(
        f"{file} {file.hash.value}" for file in installed if file.suffix == ".py" and file.hash
    )
    digest = hashlib.sha256("\n".join(modules).encode()).hexdigest()[:8]
    return f"{baton_version()}+{digest}" if modules else baton_version()
