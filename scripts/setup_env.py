"""Build a virtual environment from lock files: `setup_env.py FOLDER LOCK [LOCK ...]`.

The locks list every package, so that pip resolves nothing and only downloads and unpacks. If the
environment was already made from the same locks, the script returns at once; concurrent runs wait
for each other; after an interrupted run the environment is made again. Needs only Python and pip.

PyTorch is installed first, as its CPU build. Sources are, in this order, TORCH_INDEX (the URL of an
index, if set), pip's configured sources, PyTorch's own index of CPU builds, and last the default
build of the package index with all its dependencies (large, but it runs on a CPU too).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

MINIMUM = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent.parent
_QUICK = ("--timeout", "10", "--retries", "0")
# Imported once at the end, so that they are compiled before the first start.
_WARM = "import torch.distributed, ray.serve, ray._private.workers.default_worker, grpc.aio"


def main(arguments: Sequence[str]) -> int:
    """Make the environment; return the exit status."""
    if sys.version_info < MINIMUM:
        _say(
            f"Baton needs Python 3.11 or newer, this is {sys.version.split()[0]}: set PYTHON=...\n"
        )
        return 2
    if len(arguments) < 2:
        sys.stdout.write(__doc__ or "")
        return 2
    folder, locks = Path(arguments[0]).absolute(), [Path(name).absolute() for name in arguments[1:]]
    with _locked(folder.with_name(folder.name + ".lock")):
        try:
            ensure(folder, locks)
        except subprocess.CalledProcessError as error:
            _say(f"failed\n{error.output or error}\nwhile running {error.cmd}\n")
            return 1
    return 0


def ensure(folder: Path, locks: Sequence[Path]) -> None:
    """Install `locks` into `folder`, and this project as an editable package."""
    stamps = {folder / f".installed-{lock.stem}": _digest(lock) for lock in locks}
    missing = [lock for lock, stamp in zip(locks, stamps, strict=True) if _differs(stamp, stamps)]
    project = folder / ".installed-project"
    if not missing and not _differs(project, {project: _digest(ROOT / "pyproject.toml")}):
        return
    began = time.monotonic()
    _fresh_folder(folder)
    busy = folder / ".installing"
    busy.touch()
    # In parallel: no package is in two locks, and unpacking uses one core.
    with ThreadPoolExecutor() as threads:
        list(threads.map(partial(_install, folder), missing))
    _pip(folder, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    _warm(folder)
    project.write_text(_digest(ROOT / "pyproject.toml"))
    busy.unlink()
    _say(f"environment ready in {time.monotonic() - began:.0f} s: {folder}\n")


def _differs(stamp: Path, wanted: dict[Path, str]) -> bool:
    return not stamp.is_file() or stamp.read_text() != wanted[stamp]


def _digest(file: Path) -> str:
    return hashlib.sha256(sys.version.encode() + file.read_bytes()).hexdigest()


def _fresh_folder(folder: Path) -> None:
    """Make an environment of this Python; remove an incomplete one, or one of another Python."""
    python = folder / "bin" / "python"
    stale = (folder / ".installing").exists() or not python.exists()
    if not stale:
        version = subprocess.run(
            [python, "-c", "import sys; print(sys.version)"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        stale = version != sys.version
    if stale:
        shutil.rmtree(folder, ignore_errors=True)
        _say("creating the environment\n")
        venv.create(folder, with_pip=True, symlinks=True)


def _install(folder: Path, lock: Path) -> None:
    if _torch_version(lock):
        _install_torch(folder, _torch_version(lock))
    _install_lock(folder, lock)
    (folder / f".installed-{lock.stem}").write_text(_digest(lock))


def _torch_version(lock: Path) -> str:
    found = re.search(r"^torch==([\w.]+)$", lock.read_text(), re.MULTILINE)
    return found[1] if found else ""


def _install_torch(folder: Path, version: str) -> None:
    cpu = f"torch=={version}+cpu" if sys.platform == "linux" else f"torch=={version}"
    tries: list[tuple[str, ...]] = [
        (*_QUICK, "--no-deps", cpu),
        (*_QUICK, "--no-deps", "--index-url", TORCH_CPU_INDEX, cpu),
        (f"torch=={version}",),
    ]
    if os.environ.get("TORCH_INDEX"):
        chosen = ("--no-deps", "--index-url", os.environ["TORCH_INDEX"], f"torch=={version}")
        tries.insert(0, chosen)
    for number, arguments in enumerate(tries, start=1):
        _say(f"PyTorch {version}" + (f", source {number}" if number > 1 else "") + "\n")
        try:
            _pip(folder, *arguments)
        except subprocess.CalledProcessError:
            if number == len(tries):
                raise
        else:
            return


def _install_lock(folder: Path, lock: Path) -> None:
    """Install the packages of one lock and show the progress."""
    total = len(re.findall(r"^[\w.-]+==", lock.read_text(), re.MULTILINE))
    command = _command(folder, "--no-deps", "-r", str(lock))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        done, lines = 0, []
        for line in pip.stdout:
            lines.append(line)
            if line.startswith(("Collecting", "Requirement already satisfied")):
                done += 1
                _progress(f"{lock.name}: {done}/{total} packages")
            elif line.startswith("Installing"):
                _progress(f"{lock.name}: unpacking {total} packages")
    _progress(f"{lock.name}: {total} packages\n", last=True)
    if pip.returncode:
        raise subprocess.CalledProcessError(pip.returncode, command, "".join(lines[-30:]))


def _command(folder: Path, *arguments: str) -> list[str]:
    # Modules are compiled on first import: compiling all of them here takes a minute more.
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    return [*pip, "install", "--no-compile", "--no-input", *arguments]


def _pip(folder: Path, *arguments: str) -> None:
    subprocess.run(
        _command(folder, *arguments),
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _warm(folder: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    python = str(folder / "bin" / "python")
    subprocess.run(
        [python, "-c", _WARM],
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _say(text: str) -> None:
    sys.stdout.write(f"setup: {text}")
    sys.stdout.flush()


def _progress(text: str, *, last: bool = False) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[Ksetup: {text}")
    elif last:
        sys.stdout.write(f"setup: {text}")
    sys.stdout.flush()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another set-up to finish\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
