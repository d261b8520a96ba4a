"""The CPU kernels are compiled by this machine's compiler, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.native import build


@pytest.mark.skipif(build.load_library() is None, reason="not for this machine")
def test_it_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("-O0", *build._FLAGS[1:]))  # a quarter of the time
    build.load_library.cache_clear()
    assert build.load_library() is not None
    (built,) = (tmp_path / "native").iterdir()
    before = built.stat().st_mtime_ns
    build.load_library.cache_clear()
    assert build.load_library() is not None
    assert built.stat().st_mtime_ns == before
    build.load_library.cache_clear()


@pytest.mark.skipif(build.load_library() is None, reason="not for this machine")
def test_of_two_processes_one_builds(tmp_path):
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nexec {shutil.which("c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    root = str(Path(build.__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": root, "BATON_HOME": str(tmp_path), "CXX": str(compiler)}
    code = "from engine.kernels.native import build; assert build.load_library() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert calls.read_text() == "\n"
