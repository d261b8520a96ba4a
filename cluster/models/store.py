"""Models on this machine: find them, list them, fetch them once, converted or from the Hugging Face
Hub.

A model is a folder that transformers can read: `config.json`, `*.safetensors`, `tokenizer.json`.
Every argument that takes a model's name also takes a path to such a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.local.paths import file_lock, models_dir
from cluster.models.gguf import SOURCES, GgufSource, convert_gguf, find_or_fetch_gguf
from protocol.errors import NotFound, Unavailable

Convert = Callable[[Path, Path], None]
#: On the Hub: ORG/NAME or ORG/NAME@REVISION.
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", re.ASCII)
#: The files that Baton reads; repositories hold the weights in further formats.
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)


def is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None


def is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def find_model(name: str) -> Path:
    """The folder of a model, by name or by path. Raises NotFound saying what to do."""
    if name in SOURCES or is_hub_name(name) or "/" not in name:
        folder = models_dir() / name
        if is_model_folder(folder):
            return folder
    folder = Path(name).expanduser()
    if is_model_folder(folder):
        return folder.absolute()
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        raise NotFound(
            f"model {name!r} is GGUF, which is not served: convert it to safetensors with "
            "transformers (from_pretrained(..., gguf_file=...), save_pretrained)",
            param="model",
        )
    hint = f"`baton models get {name}` fetches it"
    if name not in SOURCES and not is_hub_name(name):
        names = ", ".join(SOURCES)
        hint = f"`baton models get` fetches {names}, or ORG/NAME from the Hugging Face Hub"
    raise NotFound(
        f"model {name!r} is neither fetched nor a folder with config.json and *.safetensors: "
        f"{hint}",
        param="model",
    )


def list_models() -> list[Path]:
    found = [*models_dir().glob("[!.]*"), *models_dir().glob("[!.]*/[!.]*")]
    return sorted(path for path in found if is_model_folder(path))


def get_model(name: str, *, convert: Convert = convert_gguf) -> Path:
    """Fetch a model unless it is there, converting it if need be; return its folder.

    Safe to call from several processes: a file lock lets one work while the others wait. The
    folder is renamed into place when complete. Raises NotFound for an unknown name, Unavailable
    when fetching fails.
    """
    if name not in SOURCES and not is_hub_name(name):
        return find_model(name)
    try:
        return find_model(name)
    except NotFound:
        target = models_dir() / name
    partial = models_dir() / f".{name.replace('/', '--')}"  # kept when a download fails
    with file_lock(partial.with_name(f"{partial.name}.lock")):
        if is_model_folder(target):
            pass
        elif name in SOURCES:
            _make_from_gguf(SOURCES[name], target, convert)
        else:
            fetch_from_hub(name, partial)
            _move_into_place(partial, target, name)
    return target


def _make_from_gguf(source: GgufSource, target: Path, convert: Convert) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        gguf = find_or_fetch_gguf(source, Path(temporary))
        converted = Path(temporary) / "model"
        converted.mkdir()
        convert(gguf, converted)
        _move_into_place(converted, target, source.title)


def _move_into_place(folder: Path, target: Path, title: str) -> None:
    if not is_model_folder(folder):
        raise Unavailable(f"{title} has no config.json with *.safetensors", param="model")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


def fetch_from_hub(name: str, folder: Path) -> None:
    """Download the files of a model into `folder`, continuing what an earlier call left there.

    Raises NotFound when the Hub has no such model or revision for this user, Unavailable when the
    download fails. HF_TOKEN and HF_ENDPOINT work as for other programs.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise Unavailable("fetching needs: pip install huggingface_hub", param="model") from error
    repository, _, revision = name.partition("@")
    try:
        snapshot_download(
            repository,
            revision=revision or None,
            local_dir=folder,
            allow_patterns=list(_HUB_FILES),
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFound(
            f"the Hub has no model {name!r}, or only for users with access: then set HF_TOKEN",
            param="model",
        ) from error
    except (OSError, ValueError) as error:  # connection, HTTP status, disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Unavailable(
            f"fetching {name} failed: {reason[0]}. The same command continues the download",
            param="model",
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's record of the download
