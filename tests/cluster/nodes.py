"""Machines of a Ray cluster, as `ray up` makes them: here each is an address of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.cluster.conftest import session_processes
from tests.cluster.load import wait_until
from tests.support.ports import free_port

_RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
_START_S = 300.0
_ATTEMPTS = 10
_COMMON = ["--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
# Its default is one port of all nodes of a machine, for which each tries for seconds.
_COMMON += ["--dashboard-agent-listen-port=0", "--include-log-monitor=false"]


class Nodes:
    """Starts nodes and cuts their power."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Ray puts Unix sockets into it, whose paths must be short.
        self._ray = tempfile.mkdtemp(prefix="ray-")
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{free_port()}"
        # Ray listens on all interfaces; without its own token it takes one from the user's home.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Its default is nice 15, which starves workers wherever anything else runs.
        self._settings = {**self.token, "RAY_worker_niceness": "0"}
        # As on a Ray that Baton starts: no idle workers for tasks, and no metrics of Ray's own.
        for name in ("enable_worker_prestart", "prestart_worker_first_driver"):
            self._settings[f"RAY_{name}"] = "0"
        self._settings["RAY_enable_metrics_collection"] = "0"
        # A node that has no time to answer has not lost power: that closes its connections.
        self._settings["RAY_health_check_timeout_ms"] = "60000"

    @property
    def logs(self) -> Path:
        """The logs of all processes."""
        return Path(self._ray) / "session_latest" / "logs"

    def start(self, host: str, pool: str, *, cpus: int) -> None:
        """A machine at `host` for replicas of `pool`; the first one is the head."""
        self.start_together({host: pool}, cpus=cpus)

    def start_together(self, pools: Mapping[str, str], *, cpus: int) -> None:
        """Machines that start at the same time: the pools of their replicas by host."""
        for attempt in range(_ATTEMPTS):
            for host, pool in pools.items():
                self._begin(host, pool, cpus)
            pools = {host: pool for host, pool in pools.items() if not self._started(host)}
            if not pools:
                return
            assert attempt + 1 < _ATTEMPTS, [self._log(host).read_text() for host in pools]
            for host in pools:
                self.kill(host)

    def _begin(self, host: str, pool: str, cpus: int) -> None:
        if self._nodes:
            role = [f"--address={self.address}"]
        else:
            port = self.address.rpartition(":")[2]
            client = f"--ray-client-server-port={free_port()}"
            role = ["--head", f"--port={port}", f"--temp-dir={self._ray}", client]
            role += ["--include-dashboard=false", "--no-monitor"]
        own = [f"--node-ip-address={host}", f"--labels=baton.io/pool={pool}", f"--num-cpus={cpus}"]
        own += ["--num-gpus=0", "--object-store-memory=80000000"]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "RAY_"))}
        sockets = self._sockets()
        with self._log(host).open("wb") as output:
            node = self._nodes[host] = subprocess.Popen(
                [*self._prefix(host), *_RAY, "start", "--block", *role, *own, *_COMMON],
                env={**env, **self._settings},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Ray names a node's socket after those that it finds: two at once would share one.
        wait_until(lambda: node.poll() is not None or self._sockets() > sockets, seconds=_START_S)

    def _log(self, host: str) -> Path:
        return self._folder / f"{host}.log"

    def _sockets(self) -> set[Path]:
        return set(Path(self._ray).glob("session_latest/sockets/raylet*"))

    def _prefix(self, host: str) -> list[str]:
        """What runs a command at a host."""
        return []

    def _started(self, host: str) -> bool:
        """Wait until a node has started; whether it has. Ray gives up after 30 seconds, which a
        busy machine may need."""
        node, log = self._nodes[host], self._log(host)

        def known() -> bool:
            return node.poll() is not None or b"Ray runtime started" in log.read_bytes()

        wait_until(known, seconds=_START_S)
        return node.poll() is None

    def kill(self, host: str) -> None:
        """Everything that runs there ends at once."""
        node = self._nodes.pop(host)

        def gone() -> bool:
            left = session_processes(node.pid)
            for row in left:
                with suppress(ProcessLookupError):  # it ended since it was listed
                    os.kill(int(row.split()[1]), signal.SIGKILL)
            return not left and node.poll() is not None

        wait_until(gone, seconds=_START_S)

    def close(self) -> None:
        """Kill all that are left."""
        for host in list(self._nodes):
            self.kill(host)
        shutil.rmtree(self._ray, ignore_errors=True)
