"""Run the steps of a Dockerfile without a builder: `image_steps.py FILE` (root, on Debian).

Each stage gets a root of its own in place of the image that it starts from: an overlay over this
machine's, which stays as it is, with this Python in /usr/local. COPY, RUN, ENV, USER and WORKDIR
are done there. After the last stage its user runs `baton --version`, and what the stage has added
is measured.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CHECK = 'test "$(id -u)" != 0 && cd && baton --version && ray --version && touch writable'
_NO_USERS = (
    "for u in $(awk -F: '$3 > 999 && $3 < 60000 {print $1}' /etc/passwd); do userdel $u; done"
)
_TIMEOUT_S = 1800


@dataclass(kw_only=True)
class Stage:
    """A stage under way. layer: what it has added to this machine's files."""

    root: Path
    layer: Path
    user: str = "0"
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    before: int = 0  # bytes in the layer that stand for the base image

    def run(self, command: str) -> None:
        """Raises CalledProcessError."""
        own = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
        name = f"getent passwd {self.user} | cut -d: -f6"
        line = f"cd {shlex.quote(self.folder)} && {command}"
        if self.user != "0":
            line = f"export HOME=$({name}); {line}"
        groups = ["--userspec", f"{self.user}:{self.user}"] if self.user != "0" else []
        subprocess.run(
            ["chroot", *groups, str(self.root), "/bin/sh", "-c", line],
            env={**own, **self.env},
            check=True,
            timeout=_TIMEOUT_S,
        )


def steps(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (line.strip() for line in joined.splitlines())
    return [(word, rest.strip()) for word, _, rest in (x.partition(" ") for x in lines if x)]


def build(file: Path, folder: Path) -> Stage:
    """Run every step; the last stage."""
    stages: dict[str, Stage] = {}
    stage = None
    for word, rest in steps(file.read_text()):
        sys.stdout.write(f"{word} {rest[:100]}\n")
        sys.stdout.flush()
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "last"
            stage = stages[name] = _stage(folder / name)
            continue
        assert stage is not None, "a Dockerfile begins with FROM"
        if word == "RUN":
            stage.run(rest)
        elif word == "COPY":
            _copy(rest, stage, stages)
        elif word == "USER":
            stage.user = rest
        elif word == "WORKDIR":
            stage.folder = rest
        elif word == "ENV":
            stage.env |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word not in ("EXPOSE", "CMD"):
            raise ValueError(f"{file}: {word} is not known here")
    assert stage is not None
    return stage


def _stage(folder: Path) -> Stage:
    root, layer, work = (folder / name for name in ("root", "layer", "work"))
    for path in (root, layer, work):
        path.mkdir(parents=True)
    options = f"lowerdir=/,upperdir={layer},workdir={work}"
    _mount("-t", "overlay", "overlay", "-o", options, str(root))
    for name in ("dev", "proc"):
        _mount("--rbind", f"/{name}", str(root / name))
    _mount("-t", "tmpfs", "tmpfs", str(root / "tmp"))
    shutil.rmtree(root / "usr" / "local", ignore_errors=True)
    kept = shutil.ignore_patterns("test", "idlelib", "__pycache__", "site-packages")
    shutil.copytree(sys.base_prefix, root / "usr" / "local", symlinks=True, ignore=kept)
    stage = Stage(root=root, layer=layer)
    stage.run("python3 -m ensurepip && ln -sf python3 /usr/local/bin/python")
    stage.run("ln -sf pip3 /usr/local/bin/pip")
    stage.run(_NO_USERS)
    stage.run("ldconfig")  # a shared library of Python, too, is in /usr/local now
    stage.before = _size(layer)
    return stage


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _copy(rest: str, stage: Stage, stages: dict[str, Stage]) -> None:
    match = re.fullmatch(r"(?:--from=(\S+) )?(\S+) (\S+)", rest)
    assert match is not None, rest
    base = stages[match[1]].root if match[1] else ROOT
    source, target = base / match[2].lstrip("/"), stage.root / match[3].lstrip("/")
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def main(arguments: list[str]) -> int:
    """Run the steps of one file; the exit status."""
    if len(arguments) != 1:
        sys.stdout.write(__doc__ or "")
        return 2
    if not os.environ.get("IMAGE_STEPS_INSIDE"):  # mounts of its own, which end with it
        again = ["unshare", "--mount", sys.executable, __file__, *arguments]
        return subprocess.run(
            again, env={**os.environ, "IMAGE_STEPS_INSIDE": "1"}, check=False
        ).returncode
    with tempfile.TemporaryDirectory(prefix="image-", dir="/var/tmp") as folder:
        _mount("-t", "tmpfs", "tmpfs", folder)  # an overlay cannot lie on another one
        try:
            stage = build(Path(arguments[0]), Path(folder))
            stage.run(_CHECK)
            added = _size(stage.layer) - stage.before
            sys.stdout.write(f"added to the base: {added / 2**20:.0f} MiB\n")
        finally:
            subprocess.run(["umount", "--recursive", "--lazy", folder], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
