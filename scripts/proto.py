"""Generate the Python code of every `*.proto` in protocol/wire: `python scripts/proto.py`.

Runs protoc from the repository's root with `-I.`, so that a file's path is its import path and the
generated code needs no editing. With `--check` nothing is written; the exit status is 1 when a
committed file differs from what would be generated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Generate or check; the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/proto.py")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check = parser.parse_args(argv).check
    with tempfile.TemporaryDirectory() as folder:
        _protoc(Path(folder))
        stale = list(_differing(Path(folder)))
        if not check:
            for path, text in stale:
                path.write_bytes(text)
    for path, _ in stale:
        sys.stderr.write(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}\n")
    return 1 if check and stale else 0


def _protoc(out: Path) -> None:
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("protocol/wire/*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)


def _differing(out: Path) -> Iterator[tuple[Path, bytes]]:
    for made in sorted(path for path in out.rglob("*") if path.is_file()):
        path, text = ROOT / made.relative_to(out), made.read_bytes()
        if not path.exists() or path.read_bytes() != text:
            yield path, text


if __name__ == "__main__":
    sys.exit(main())
