"""The committed gRPC code is what `make proto` writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_current():
    run = subprocess.run(
        [sys.executable, "-m", "protocol.wire.generate", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
