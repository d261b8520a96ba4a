"""Temporary folders that go with their process."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from engine.ranks.group import ProcessTempdir

HOLD = """
import sys
from pathlib import Path
from engine.ranks.group import ProcessTempdir
folder = ProcessTempdir(Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_a_folder_goes_with_its_object(tmp_path: Path) -> None:
    parent = tmp_path / "deep" / "ranks"
    folder = ProcessTempdir(parent)
    (folder.path / "store").write_text("x")
    other = ProcessTempdir(parent)
    assert names(parent) == {folder.path.name, other.path.name}
    assert parent.stat().st_mode & 0o77 == 0
    del folder
    gc.collect()
    assert names(parent) == {other.path.name}


def test_what_a_killed_process_left_goes_when_the_next_comes(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    paths = []
    for holder in holders:
        assert holder.stdout is not None
        paths.append(Path(holder.stdout.readline().strip()))
    killed, alive = holders
    killed.kill()
    killed.wait(60)
    assert paths[0].is_dir()
    mine = ProcessTempdir(tmp_path)
    assert names(tmp_path) == {paths[1].name, mine.path.name}
    alive.communicate("")
    assert alive.returncode == 0
    assert names(tmp_path) == {mine.path.name}
