"""Machines with a network of their own, made of namespaces: with a cable pulled, what is sent there
is dropped, as by a machine without power. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.cluster.conftest import session_processes
from tests.cluster.nodes import Nodes

NETWORK = "10.78.0"
HEAD = f"{NETWORK}.1"


def run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"


class Machines(Nodes):
    """Ray nodes, the head in this network namespace and each other one in its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"{HEAD}:{self.address.rpartition(':')[2]}"
        self._tag = f"bc{os.getpid() % 10000}"
        self._cables: dict[str, str] = {}
        # A machine that does not answer is given up after some fifteen seconds.
        self._settings |= {
            "RAY_health_check_timeout_ms": "4000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "4",
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # as in deploy/
        }
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{HEAD}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    @property
    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _prefix(self, host: str) -> list[str]:
        if host == HEAD:
            return []
        return ["ip", "netns", "exec", self._namespace(host)]

    def _namespace(self, host: str) -> str:
        return f"{self._tag}n{host.rpartition('.')[2]}"

    def start(self, host: str, pool: str, *, cpus: int) -> None:
        if host != HEAD and host not in self._cables:
            self._connect(host)
        super().start(host, pool, cpus=cpus)

    def _connect(self, host: str) -> None:
        number = host.rpartition(".")[2]
        here, there, name = f"{self._tag}a{number}", f"{self._tag}b{number}", self._namespace(host)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        run("ip", "link", "set", here, "master", self._bridge, "up")
        run("ip", "link", "set", there, "netns", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", there)
        run("ip", "-n", name, "link", "set", there, "up")
        # Machines find their own address by the way to another network, which does not exist.
        run("ip", "-n", name, "route", "add", "default", "via", HEAD)
        self._cables[host] = here

    def pull(self, host: str) -> None:
        """It runs on, and neither hears nor answers."""
        run("ip", "link", "set", self._cables[host], "down")

    def plug(self, host: str) -> None:
        """Undo `pull`."""
        run("ip", "link", "set", self._cables[host], "up")

    def remove(self, host: str) -> None:
        """End what runs there, cable pulled, and take the machine away."""
        self.pull(host)
        self.kill(host)
        run("ip", "netns", "del", self._namespace(host))
        run("ip", "link", "del", self._cables.pop(host), check=False)

    def processes(self, host: str, title: str) -> list[int]:
        """The process ids of a machine whose command line contains `title`."""
        rows = session_processes(self._nodes[host].pid)
        return [int(row.split()[1]) for row in rows if title in row]

    def signal(self, host: str, title: str, number: signal.Signals) -> list[int]:
        """Send a signal to all of them; their ids."""
        found = self.processes(host, title)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return found

    def close(self) -> None:
        for host in list(self._cables):
            self.remove(host)
        super().close()
        run("ip", "link", "del", self._bridge, check=False)
