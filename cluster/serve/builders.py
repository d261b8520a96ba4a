"""Application builders for `serve deploy` and KubeRay's RayService.

One application per pool; in a clone without `baton_llm.` in front. Its arguments are `config`, a
file that every node can read, and optionally `set`, overrides like those of `baton up --set`:

    applications:
      - name: decode
        route_prefix: null
        import_path: baton_llm.cluster.serve.builders:decode
        external_scaler_enabled: true
        args: {config: /etc/baton/config.yaml, set: ["decode.replicas=4"]}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cluster.config.checks import check_config, warnings_of
from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from cluster.membership.directory import create_directory
from cluster.membership.table import Pool
from cluster.models.store import find_model
from cluster.serve.deployments import application, describe_pool, record
from cluster.serve.pool_backend import ServePools
from observability.logging import get_logger
from protocol.errors import InvalidRequest
from protocol.ids import Role

log = get_logger(__name__)


def router(args: Mapping[str, Any]) -> Any:
    return _application(args, Pool.ROUTER)


def prefill(args: Mapping[str, Any]) -> Any:
    return _application(args, Pool.PREFILL)


def decode(args: Mapping[str, Any]) -> Any:
    return _application(args, Pool.DECODE)


def read_arguments(args: Mapping[str, Any]) -> ClusterConfig:
    """The configuration that a builder's arguments name. Raises InvalidRequest."""
    unknown = sorted(args.keys() - {"config", "set"})
    if unknown:
        raise InvalidRequest(f"args.{unknown[0]}: only config and set are known", param="args")
    if "config" not in args:
        raise InvalidRequest("args.config is required: the configuration file", param="args")
    return load_config(args["config"], overrides=args.get("set", ()), environ=os.environ).config


def _application(args: Mapping[str, Any], pool: Pool) -> Any:
    config, secret = _prepare(args)
    record(secret, pool, describe_pool(config, pool))
    return application(config, pool, spare=config.ray.autoscaling)


def _prepare(args: Mapping[str, Any]) -> tuple[ClusterConfig, bytes]:
    """The checked configuration, and the cluster's secret. The first builder starts the directory,
    and the first of a changed configuration gives it to the directory."""
    config = read_arguments(args)
    models = {role: find_model(config.model_name(role)) for role in Role}
    check_config(config, find_model(config.model.name), models)
    for warning in warnings_of(config):
        log.warning(warning)
    return config, create_directory(config, ServePools)
