"""The files under deploy/ match the schemas of the programs that read them, and each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from cluster.serve.builders import read_arguments
from protocol.errors import InvalidRequest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
RAY_FILES = sorted((DEPLOY / "ray").glob("*.yaml"))
LABEL = "baton.io/pool"
POOLS = ("prefill", "decode")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Ray's, of the files that `ray up` reads."""
    import ray.autoscaler

    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.fixture(scope="module")
def gpu_cluster() -> ClusterConfig:
    return load_config(DEPLOY / "configs" / "gpu-cluster.yaml").config


def test_every_target_is_there() -> None:
    assert [path.stem for path in RAY_FILES] == ["aws", "gcp", "onprem"]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_ray_up_file_fits_rays_schema(path: Path, schema: dict[str, Any]) -> None:
    config = read(path)
    config.pop("min_workers", None)  # moved into the one node type of local clusters by Ray
    jsonschema.validate(config, schema)


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_ray_completes_the_file(path: Path, schema: dict[str, Any]) -> None:
    """Ray's own reading of the file, with its defaults filled in, is whole and valid."""
    from ray.autoscaler._private.util import prepare_config

    prepared = prepare_config(read(path))
    jsonschema.validate(prepared, schema)
    types = prepared["available_node_types"]
    assert prepared["head_node_type"] in types
    assert sum(node.get("min_workers", 0) for node in types.values()) <= prepared["max_workers"]


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_pools_have_node_types_of_their_own(name: str, gpu_cluster: ClusterConfig) -> None:
    types = read(DEPLOY / "ray" / f"{name}.yaml")["available_node_types"]
    assert set(types) == {"head", *POOLS}
    assert types["head"]["labels"] == gpu_cluster.router.placement.labels
    for pool in POOLS:
        assert types[pool]["labels"] == {LABEL: pool}
        assert types[pool]["labels"] == getattr(gpu_cluster, pool).placement.labels
        assert types[pool]["max_workers"] >= types[pool]["min_workers"] >= 1
        assert any("nvidia-smi" in line for line in types[pool]["initialization_commands"])
    assert types["prefill"]["node_config"] != types["decode"]["node_config"]


@pytest.mark.parametrize(
    ("name", "image", "account"),
    [("aws", "ImageId", "IamInstanceProfile"), ("gcp", "disks", "serviceAccounts")],
)
def test_rented_machines_can_run_it_and_read_the_model(name: str, image: str, account: str) -> None:
    """Ray's own image for AWS has Python 3.6, Ubuntu before 24.04 one before 3.11. An account that
    may read buckets is given by Ray to the head node only."""
    types = read(DEPLOY / "ray" / f"{name}.yaml")["available_node_types"]
    for node in types.values():
        systems = re.findall(r"ubuntu-(?:accelerator-)?(\d+)", str(node["node_config"][image]))
        assert set(systems) <= {"2404"}
    for pool in POOLS:
        assert types[pool]["node_config"][account]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_the_head_node_has_the_configuration_that_is_started_there(path: Path) -> None:
    config = re.search(r"baton up (~/\S+)/(\S+)", path.read_text())
    assert config is not None
    source = DEPLOY.parent / read(path)["file_mounts"][config[1]]
    assert (source / config[2]).is_file()


def test_onprem_machines_label_themselves() -> None:
    config = read(DEPLOY / "ray" / "onprem.yaml")
    start = config["worker_start_ray_commands"][-1]
    assert f'--labels="{LABEL}=$pool"' in start
    decode_ips = start.split('decode_ips="')[1].split('"')[0].split()
    assert set(decode_ips) < set(config["provider"]["worker_ips"])
    assert f'--labels="{LABEL}=router"' in config["head_start_ray_commands"][0]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_setup_can_be_repeated(path: Path) -> None:
    """`ray up` runs setup again on every call: nothing may be appended or made twice."""
    for line in read(path)["setup_commands"]:
        if ">>" in line:
            assert "grep -q" in line
        if "-m venv" in line:
            assert line.startswith("test -d")


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_a_rebuilt_wheel_of_the_same_version_is_installed(path: Path) -> None:
    """By default pip skips a version that is installed, and the old code would stay."""
    lines = [line for line in read(path)["setup_commands"] if "baton_llm-*.whl" in line]
    assert "--no-deps --force-reinstall" in lines[-1]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_workers_are_not_niced(path: Path) -> None:
    """At Ray's default, nice 15, any other program starves the workers."""
    config = read(path)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "export RAY_worker_niceness=0" in commands[0]


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_unhealthy_replicas_are_stopped_at_once(path: Path) -> None:
    """By default Serve's controller lets a frozen replica keep its clients and GPU."""
    start = read(path)["head_start_ray_commands"][0]
    assert "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1" in start


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_ray_has_a_token_and_starts_baton_once(path: Path) -> None:
    """A port of Ray without one runs what it is sent."""
    config = read(path)
    assert "~/.ray/auth_token" in config["file_mounts"]
    ray, baton = config["head_start_ray_commands"]
    for command in (ray, baton, *config["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in command
    assert "ray status > /dev/null 2>&1 ||" in ray
    assert "baton status > /dev/null 2>&1 ||" in baton


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_service() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "k8s" / "rayservice.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["RayService", "Service"]
    return documents[0]["spec"]


def test_rayservice_applications_name_the_builders(ray_service: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    serve = ServeDeploySchema(**yaml.safe_load(ray_service["serveConfigV2"]))
    import cluster.serve.builders as builders

    names = [application.name for application in serve.applications]
    assert sorted(names) == ["decode", "prefill", "router"]
    for application in serve.applications:
        module, _, function = application.import_path.partition(":")
        assert module == "baton_llm.cluster.serve.builders"
        assert function == application.name
        assert callable(getattr(builders, function))
        assert application.external_scaler_enabled
        assert application.route_prefix is None


def groups(ray_service: dict[str, Any]) -> dict[str, Any]:
    return {
        group["groupName"]: group for group in ray_service["rayClusterConfig"]["workerGroupSpecs"]
    }


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container


def test_rayservice_groups_carry_the_labels(
    ray_service: dict[str, Any], gpu_cluster: ClusterConfig
) -> None:
    labels = {name: group["labels"] for name, group in groups(ray_service).items()}
    assert labels == {
        name: getattr(gpu_cluster, name).placement.labels for name in ("router", *POOLS)
    }


def test_rayservice_comes_up(ray_service: dict[str, Any]) -> None:
    """KubeRay deploys the applications once the head is ready, so the head must not wait for them;
    it asks Ray Serve's proxy, which is not there, whether a worker without a probe is ready."""
    head = ray_service["rayClusterConfig"]["headGroupSpec"]
    assert not {"readinessProbe", "ports"} & set(ray_container(head))
    probes = {
        name: ray_container(group)["readinessProbe"]["httpGet"]
        for name, group in groups(ray_service).items()
    }
    ray_is_up = {"path": "/api/local_raylet_healthz", "port": 52365}
    assert probes == {
        "router": {"path": "/ready", "port": 8000},
        "prefill": ray_is_up,
        "decode": ray_is_up,
    }


def test_rayservice_pods_may_finish_their_requests(
    ray_service: dict[str, Any], gpu_cluster: ClusterConfig
) -> None:
    for group in groups(ray_service).values():
        env = {variable["name"]: variable["value"] for variable in ray_container(group)["env"]}
        drain_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert gpu_cluster.lifecycle.drain_s < drain_s < grace_s


def test_rayservice_grows_when_replicas_ask(
    ray_service: dict[str, Any], gpu_cluster: ClusterConfig
) -> None:
    assert gpu_cluster.ray.autoscaling
    assert ray_service["rayClusterConfig"]["enableInTreeAutoscaling"]
    assert ray_service["rayClusterConfig"]["autoscalerOptions"] == {"version": "v2"}


def test_the_service_leads_to_ready_routers(
    ray_service: dict[str, Any], gpu_cluster: ClusterConfig
) -> None:
    service = list(yaml.safe_load_all((DEPLOY / "k8s" / "rayservice.yaml").read_text()))[1]["spec"]
    assert service["selector"] == {"ray.io/group": "router"}
    ports = {port["targetPort"] for port in service["ports"]}
    assert ports == {gpu_cluster.network.http_port, gpu_cluster.network.grpc_port}
    open_ports = ray_container(groups(ray_service)["router"])["ports"]
    assert ports == {port["containerPort"] for port in open_ports}


def test_builder_arguments(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny}")
    config = read_arguments({"config": str(path), "set": ["decode.replicas=3"]})
    assert config.decode.replicas == 3
    with pytest.raises(InvalidRequest, match=r"args\.config is required"):
        read_arguments({})
    with pytest.raises(InvalidRequest, match=r"args\.colour"):
        read_arguments({"config": str(path), "colour": "red"})


def test_rays_ports_are_closed(ray_service: dict[str, Any]) -> None:
    assert ray_service["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_guards_select_the_pods_of_the_ray_service(
    ray_service: dict[str, Any], gpu_cluster: ClusterConfig
) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "k8s" / "guards.yaml").read_text()))
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents}) == len(documents)
    chosen = {}
    for document in documents:
        spec = document["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        chosen[document["kind"], document["metadata"]["name"]] = selector["matchLabels"]
    for group in groups(ray_service):
        assert chosen["PodDisruptionBudget", f"baton-{group}"] == {"ray.io/group": group}
    router = {"ray.io/group": "router"}
    assert chosen["PodMonitor", "baton"] == chosen["NetworkPolicy", "baton-front-ends"] == router
    assert chosen["NetworkPolicy", "baton-inside"] == {"ray.io/is-ray-node": "yes"}
    (front,) = (d for d in documents if d["metadata"]["name"] == "baton-front-ends")
    ports = {port["port"] for rule in front["spec"]["ingress"] for port in rule["ports"]}
    assert ports == {gpu_cluster.network.http_port, gpu_cluster.network.grpc_port}
    (monitor,) = (d for d in documents if d["kind"] == "PodMonitor")
    names = {port["name"] for port in ray_container(groups(ray_service)["router"])["ports"]}
    assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= names
