"""What Baton uses of Ray that has no public name: nowhere else.

Another version may rename or change it, so `pyproject.toml` bounds Ray from above; to raise the
bound, check this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import ray
from ray._private.state import actors, available_resources_per_node
from ray.experimental import internal_kv

__all__ = [
    "ControllerMethod",
    "actor_state",
    "available_resources_per_node",
    "delete_value",
    "deployment_id",
    "get_value",
    "put_value",
    "serve_controller",
]


delete_value = internal_kv._internal_kv_del
get_value = internal_kv._internal_kv_get
put_value = internal_kv._internal_kv_put


class ControllerMethod(StrEnum):
    """Methods of Serve's controller."""

    DETAILS = "get_serve_instance_details"
    RESIZE = "update_deployment_replicas"
    DELETE = "delete_apps"
    SHUT_DOWN = "graceful_shutdown"


def actor_state(handle: Any) -> Mapping[str, Any]:
    """What Ray knows of an actor: its `State`, `NumRestarts` and more."""
    found: Mapping[str, Any] = actors(handle._actor_id.hex())
    return found


# Serve takes as long to import as all of Ray: commands that don't ask it don't wait for it.


def serve_controller() -> Any:
    """The handle of Serve's controller. Raises ValueError where Serve does not run."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def deployment_id(name: str) -> Any:
    """How Serve's controller is told of the deployment of an application of the same name."""
    from ray.serve._private.common import DeploymentID

    return DeploymentID(name=name, app_name=name)
