"""Models on this machine: find them, list them, fetch them once.

A model is a folder that transformers can read: `config.json`, `*.safetensors`, `tokenizer.json`.
Every argument that takes a model's name also takes a path to such a folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.local.paths import file_lock, models_dir
from cluster.models.gguf import SOURCES, GgufSource, convert_gguf, find_or_fetch_gguf
from protocol.errors import NotFound, Unavailable

Convert = Callable[[Path, Path], None]


def is_model_folder(path: Path) -> bool:
    """Whether `path` holds a configuration and weights."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def find_model(name: str) -> Path:
    """The folder of a model, by name or by path. Raises NotFound saying what to do."""
    if name in SOURCES or "/" not in name:
        folder = models_dir() / name
        if is_model_folder(folder):
            return folder
    folder = Path(name).expanduser()
    if is_model_folder(folder):
        return folder.absolute()
    if name in SOURCES:
        raise NotFound(
            f"model {name!r} is not on this machine: run `baton models get {name}`", param="model"
        )
    known = ", ".join(sorted(SOURCES))
    raise NotFound(
        f"model {name!r} is neither a fetched model, nor a folder with config.json and "
        f"*.safetensors, nor one of those that can be fetched ({known})",
        param="model",
    )


def list_models() -> list[Path]:
    """The model folders below the models directory, by name."""
    return sorted(path for path in models_dir().glob("[!.]*") if is_model_folder(path))


def get_model(name: str, *, convert: Convert = convert_gguf) -> Path:
    """Fetch and convert a model unless it is there; return its folder.

    Safe to call from several processes: a file lock lets one work while the others wait. The
    folder is renamed into place when complete. Raises NotFound for an unknown name, Unavailable
    when fetching fails.
    """
    if name not in SOURCES:
        return find_model(name)
    target = models_dir() / name
    if is_model_folder(target):
        return target
    with file_lock(models_dir() / f".{name}.lock"):
        if not is_model_folder(target):
            _make_folder(SOURCES[name], target, convert)
    return target


def _make_folder(source: GgufSource, target: Path, convert: Convert) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        gguf = find_or_fetch_gguf(source, Path(temporary))
        converted = Path(temporary) / "model"
        converted.mkdir()
        convert(gguf, converted)
        if not is_model_folder(converted):
            raise Unavailable(f"converting {source.title} left no usable folder", param="model")
        shutil.rmtree(target, ignore_errors=True)
        converted.rename(target)
