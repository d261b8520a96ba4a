"""Machines reached by SSH, made of namespaces: each has an address, processes, /tmp and a home of
its own, and a Python with Baton's dependencies; nothing else of Baton. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.1"
#: Where sshd and rsync lie if they are not installed: their packages, unpacked.
EXTRA_ROOT = os.environ.get("TEST_SSH_ROOT", "/")
_PATHS = [f"{EXTRA_ROOT}/{folder}" for folder in ("usr/sbin", "usr/bin", "sbin", "bin")]
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = ":".join([*_PATHS, _SYSTEM])
LIBRARIES = f"{EXTRA_ROOT}/usr/lib/x86_64-linux-gnu:{EXTRA_ROOT}/lib/x86_64-linux-gnu"
_SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
UseDNS no
MaxStartups 100
SetEnv PATH={path} LD_LIBRARY_PATH={libraries}
"""
_NEW_MACHINE = (
    *("unshare", "--pid", "--mount", "--ipc", "--fork", "--mount-proc", "--kill-child"),
)
_PASSWD = """\
root:x:0:0:root:{home}:/bin/bash
sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin
"""
_INIT = """\
set -e
mount --bind {folder}/{name}.passwd /etc/passwd
mount -t tmpfs tmpfs /tmp
mkdir -p /run/sshd
exec {sshd} -D -e -f {folder}/{name}.conf
"""


def missing() -> str:
    """What such machines need and this one lacks; empty if nothing."""
    if os.geteuid() != 0:
        return "root"
    tools = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd", "rsync")
    lacks = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
    return ", ".join(lacks)


def run(*command: str, check: bool = True) -> str:
    """The output of a command of the system."""
    env = {**os.environ, "PATH": PATH, "LD_LIBRARY_PATH": LIBRARIES}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Hosts:
    """The machines by name, and the bridge between them, on which this process has GATEWAY."""

    def __init__(self, folder: Path, addresses: Mapping[str, str], *, model: Path) -> None:
        self.folder = folder
        self.addresses = dict(addresses)
        self._model = model
        self._tag = f"bt{os.getpid() % 10000}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("host_key", "key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        self._device = f"{self._tag}br"
        try:
            self._build()
        except BaseException:  # a bridge that stays keeps later machines from their network
            self.close()
            raise

    def _build(self) -> None:
        run("ip", "link", "add", self._device, "type", "bridge")
        run("ip", "addr", "add", f"{GATEWAY}/24", "dev", self._device)
        run("ip", "link", "set", self._device, "up")
        for number, name in enumerate(self.addresses):
            self._cable(number, name)
            self.start(name)

    def _cable(self, number: int, name: str) -> None:
        namespace, here, there = (
            f"{self._tag}{name}",
            f"{self._tag}a{number}",
            f"{self._tag}b{number}",
        )
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        run("ip", "link", "set", here, "master", self._device, "up")
        run("ip", "link", "set", there, "netns", namespace)
        inside = ("ip", "-n", namespace)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "addr", "add", f"{self.addresses[name]}/24", "dev", there)
        run(*inside, "link", "set", there, "up")
        # Machines find their own address by the way to another network, which does not exist.
        run(*inside, "route", "add", "default", "via", GATEWAY)

    def start(self, name: str) -> None:
        """Power on, with the disk as it was."""
        home = self.folder / name
        if not home.exists():
            self._furnish(home)
        (self.folder / f"{name}.conf").write_text(
            _SSHD.format(
                address=self.addresses[name], folder=self.folder, path=PATH, libraries=LIBRARIES
            )
        )
        (self.folder / f"{name}.passwd").write_text(_PASSWD.format(home=home))
        sshd = shutil.which("sshd", path=PATH)
        init = _INIT.format(folder=self.folder, name=name, sshd=sshd)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*("ip", "netns", "exec", f"{self._tag}{name}", *_NEW_MACHINE), "sh", "-c", init],
                env={"PATH": PATH, "LD_LIBRARY_PATH": LIBRARIES},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while not self.reached(name):
            assert time.monotonic() < deadline, (self.folder / f"{name}.log").read_text()
            time.sleep(0.2)

    def _furnish(self, home: Path) -> None:
        """A home with a virtual environment that has the dependencies, and the model."""
        venv = home / "baton-venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next((venv / "lib").glob("python3*")) / "site-packages"
        # Entries of a path file are taken as they are: the editable Baton there stays unseen.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for name, code in (("pip", "pip._internal.cli.main"), ("ray", "ray.scripts.scripts")):
            script = venv / "bin" / name
            script.write_text(
                f"#!{venv}/bin/python\nimport sys\nfrom {code} import main\nsys.exit(main())\n"
            )
            script.chmod(0o755)
        (home / ".config" / "pip").mkdir(parents=True)
        # What is not here cannot be fetched.
        (home / ".config" / "pip" / "pip.conf").write_text(
            "[global]\nno-index = true\nno-deps = true\n"
        )
        exports = f"export PATH={PATH} LD_LIBRARY_PATH={LIBRARIES}\n"
        (home / ".bashrc").write_text(exports if EXTRA_ROOT != "/" else "")
        shutil.copytree(self._model, home / "model")

    def reached(self, name: str) -> bool:
        return (
            run("ip", "netns", "exec", f"{self._tag}{name}", "ss", "-ltn", check=False).find(
                f"{self.addresses[name]}:22"
            )
            >= 0
        )

    def ssh(self, name: str, command: str, *, check: bool = True) -> str:
        """The output of a command on a machine, run by a login shell."""
        options = ["-i", str(self.folder / "key"), "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        return run("ssh", *options, f"root@{self.addresses[name]}", command, check=check)

    def cut_power(self, name: str) -> None:
        """End every process at once and let the network drop what is sent there: nothing is
        refused, as by a machine without power."""
        process = self._processes.pop(name)
        namespace = f"{self._tag}{name}"
        links = run("ip", "-n", namespace, "-o", "link", "show").splitlines()
        device = next(line.split()[1].split("@")[0] for line in links if "lo:" not in line)
        run("ip", "-n", namespace, "link", "set", device, "down")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def restore_power(self, name: str) -> None:
        namespace = f"{self._tag}{name}"
        links = run("ip", "-n", namespace, "-o", "link", "show").splitlines()
        device = next(line.split()[1].split("@")[0] for line in links if "lo:" not in line)
        run("ip", "-n", namespace, "link", "set", device, "up")
        run("ip", "-n", namespace, "route", "add", "default", "via", GATEWAY)
        self.start(name)

    def processes(self, name: str) -> list[str]:
        """The command lines of a machine's processes, sshd and the question itself aside."""
        lines = self.ssh(name, "ps -eo args=").splitlines()
        return [
            line for line in lines if not any(own in line for own in ("sshd", "ps -eo", "sh -c"))
        ]

    def close(self) -> None:
        for process in self._processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        for name in self.addresses:
            run("ip", "netns", "del", f"{self._tag}{name}", check=False)
        run("ip", "link", "del", self._device, check=False)
