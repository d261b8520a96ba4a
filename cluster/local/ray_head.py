"""Holds a local Ray cluster: `python -m cluster.local.ray_head STATE_FILE OPTIONS`.

It starts Ray's daemons as its children and writes Ray's address into STATE_FILE. SIGTERM, or its
death (through Ray's reaper), ends them. So the cluster outlives the command that started it, and
one session id covers all of its processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Hold Ray until SIGTERM or SIGINT."""
    target, options = Path(arguments[0]), json.loads(arguments[1])
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    import ray

    context = ray.init(
        address="local",  # whatever RAY_ADDRESS says
        num_cpus=options["num_cpus"],
        object_store_memory=options["object_store_bytes"],
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="baton-head",
        _temp_dir=options["temp_dir"],
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    temporary = target.with_suffix(".new")
    temporary.write_text(json.dumps({"address": context.address_info["gcs_address"]}))
    temporary.rename(target)
    signal.sigwait(stop_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1:]))
