"""Reads safetensors checkpoints; each rank reads its slices only."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelRefused
from engine.model.digest import TensorBytes, checkpoint_digest
from engine.model.weight_files import read_header, weight_owners
from observability.logging import get_logger

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_COMPARED_ROWS = 4096
#: Tensors of the decoder, and of those the ones that follow from config.json.
_DECODER, _DERIVED = "model.", ".rotary_emb.inv_freq"
#: Served number types; others are quantised.
_WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")

Span = tuple[int, int]
log = get_logger(__name__)


class Checkpoint:
    """The tensors of a model folder. Every failure is a ModelRefused naming the file or tensor.
    With an index, a tensor is read from the file that the index names; other files are ignored."""

    def __init__(
        self,
        model_path: str | Path,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._folder = Path(model_path)
        self._dtype = dtype
        self._device = device or torch.device("cpu")
        self._owners = weight_owners(self._folder)
        self._files: dict[Path, Any] = {}
        self._used: set[str] = set()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """Rows and columns of tensor `name`, whose whole shape must be `shape`."""
        path = self._owners.get(name)
        if path is None:
            raise ModelRefused(f"{self._folder}: tensor {name} is missing", param=name)
        self._used.add(name)
        try:
            part = self._open(path).get_slice(name)
            found = tuple(part.get_shape())
            if found != shape:
                raise ModelRefused(
                    f"{path}: tensor {name} has shape {list(found)}, expected {list(shape)}",
                    param=name,
                )
            if part.get_dtype() not in _WEIGHT_TYPES:
                raise ModelRefused(
                    f"{path}: tensor {name} is {part.get_dtype()}, which config.json states "
                    "no quantization_config for",
                    param=name,
                )
            data = _slice(part, rows, columns)
        except SafetensorError as error:
            raise ModelRefused(f"{path}: tensor {name}: {error}", param=name) from error
        return data.to(device=self._device, dtype=self._dtype).contiguous()

    def header(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Type and shape of a tensor, None where the checkpoint has none of this name."""
        path = self._owners.get(name)
        if path is None:
            return None
        try:
            part = self._open(path).get_slice(name)
            return str(part.get_dtype()), tuple(part.get_shape())
        except SafetensorError as error:
            raise ModelRefused(f"{path}: tensor {name}: {error}", param=name) from error

    def stored(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Rows and columns of a tensor that exists, in the type that it is stored in."""
        path = self._owners[name]
        self._used.add(name)
        try:
            file = self._open(path)
            if rows is None and columns is None:  # a scalar cannot be sliced
                data: Tensor = file.get_tensor(name)
            else:
                data = _slice(file.get_slice(name), rows, columns)
        except SafetensorError as error:
            raise ModelRefused(f"{path}: tensor {name}: {error}", param=name) from error
        return data.to(self._device).contiguous()

    def place(self, name: str) -> Path:
        """The file of a tensor, or of another of its module; the folder where there is none."""
        if name in self._owners:
            return self._owners[name]
        paths = (path for own, path in self._owners.items() if own.startswith(f"{name}."))
        return next(paths, self._folder)

    def check(self, *, tied: bool = False) -> None:
        """Open every file that owns a tensor, so that truncated and missing shards show before
        loading. With `tied` embeddings, warn when the file has another output head: it is not used.
        """
        for path in sorted(set(self._owners.values())):
            self._open(path)
        if tied and HEAD in self._owners and not self._same(HEAD, EMBEDDING):
            log.warning(
                "config.json ties the word embeddings, but the checkpoint has an output head of "
                "its own: the embedding is used",
                extra={"used": EMBEDDING, "ignored": HEAD, "folder": str(self._folder)},
            )

    def check_unused(self, *, tied: bool) -> None:
        """Raise ModelRefused naming a tensor of the decoder that loading did not read: the model
        computes something else than config.json says. Others are named in a warning."""
        left = [name for name in self._owners if name not in self._used]
        left = [name for name in left if not name.endswith(_DERIVED) and (name != HEAD or not tied)]
        for name in left:
            if name.startswith(_DECODER):
                raise ModelRefused(
                    f"{self._owners[name]}: tensor {name} has no place in the model that "
                    "config.json describes",
                    param=name,
                )
        if left:
            log.warning(
                "the checkpoint has tensors that are not used",
                extra={"ignored": left[:8], "number": len(left), "folder": str(self._folder)},
            )

    def _same(self, first: str, second: str) -> bool:
        """Whether two tensors are equal; compared a few rows at a time."""
        if second not in self._owners:
            return False
        parts = [self._open(self._owners[name]).get_slice(name) for name in (first, second)]
        shapes = [tuple(part.get_shape()) for part in parts]
        if shapes[0] != shapes[1]:
            return False
        return all(
            torch.equal(*(part[row : row + _COMPARED_ROWS] for part in parts))
            for row in range(0, shapes[0][0], _COMPARED_ROWS)
        )

    def family_digest(self) -> str:
        """A name that precisions of one model share: of the signs of the first embeddings, which no
        format quantises and no number type changes."""
        rows = self.header(EMBEDDING)
        if rows is None:
            raise ModelRefused(f"{self._folder}: tensor {EMBEDDING} is missing", param=EMBEDDING)
        table = self.stored(EMBEDDING, (0, min(_COMPARED_ROWS, rows[1][0])))
        signs = np.packbits(table.signbit().cpu().numpy())
        return hashlib.sha256(signs.tobytes()).hexdigest()[:32]

    def digest(self) -> str:
        """A name of the content, equal for the same weights however they are sharded."""
        headers = {path: read_header(path) for path in set(self._owners.values())}
        tensors = {}
        for name, path in self._owners.items():
            entries, start = headers[path]
            if name not in entries:
                raise ModelRefused(f"{path}: tensor {name} is missing", param=name)
            entry = entries[name]
            first, last = entry["data_offsets"]
            kind = f"{entry['dtype']} {entry['shape']}"
            tensors[name] = TensorBytes(path, start + first, last - first, kind)
        return checkpoint_digest(tensors)

    def _open(self, path: Path) -> Any:
        file = self._files.get(path)
        if file is None:
            try:
                file = self._files[path] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelRefused(f"{path} cannot be read: {error}", param=str(path)) from error
        return file


def _slice(part: Any, rows: Span | None, columns: Span | None) -> Tensor:
    row_slice = slice(None) if rows is None else slice(*rows)
    data: Tensor = part[row_slice] if columns is None else part[row_slice, slice(*columns)]
    return data
