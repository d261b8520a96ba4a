"""The CPU kernels are compiled by this machine's compiler, once."""

from __future__ import annotations

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
