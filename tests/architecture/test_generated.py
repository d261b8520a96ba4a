"""What is made from the code and committed is what would be made now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["scripts/proto.py", "--check"], id="make proto"),
        pytest.param(["scripts/docs.py", "--check"], id="make docs"),
    ],
)
def test_made_files_are_current(command):
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
