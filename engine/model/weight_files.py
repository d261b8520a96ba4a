"""The files of a safetensors checkpoint: which they are, and their headers. Needs no torch, so that
the command line can check a folder before anything starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from engine.errors import ModelRefused

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def check_weight_files(folder: Path) -> None:
    """Raise ModelRefused naming a weight file that is missing, truncated or none."""
    for path in sorted(set(weight_owners(folder).values())):
        read_header(path)


def weight_owners(folder: Path) -> dict[str, Path]:
    """The file of each tensor: with an index the one that it names. Raises ModelRefused."""
    index = folder / INDEX_FILE
    if index.exists():
        return _owners_by_index(folder, index)
    single = folder / SINGLE_FILE
    if not single.exists():
        raise ModelRefused(
            f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}", param=str(single)
        )
    tensors, _ = read_header(single)
    return dict.fromkeys(tensors, single)


def _owners_by_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        owners = {str(name): folder / Path(file).name for name, file in names.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelRefused(f"{index} cannot be read: {error!r}", param=str(index)) from error
    for path in set(owners.values()):
        if not path.exists():
            raise ModelRefused(f"{path} is missing, but {INDEX_FILE} names it", param=str(path))
    return owners


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The header of a safetensors file and where its data starts.

    https://huggingface.co/docs/safetensors: eight bytes of length, then a JSON object.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}", param=str(path)) from error
    except (ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{path} cannot be read: no safetensors file (cut short, or a pointer of git-lfs?)",
            param=str(path),
        ) from error
    if path.stat().st_size < 8 + length + end:
        raise ModelRefused(f"{path} is truncated", param=str(path))
    return header, 8 + length
