"""The files under deploy/k8s match the schemas of the programs that read them, and each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from tests.support.kuberay import RAY_SERVICE

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
POOLS = ("prefill", "decode")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def gpu_cluster() -> ClusterConfig:
    return load_config(DEPLOY / "configs" / "gpu-cluster.yaml").config


K8S = DEPLOY / "k8s"


@pytest.fixture(scope="module")
def k8s() -> ClusterConfig:
    """The configuration of the ConfigMap."""
    return load_config(K8S / "config.yaml").config


@pytest.fixture(scope="module")
def ray_service() -> dict[str, Any]:
    document = read(K8S / "rayservice.yaml")
    jsonschema.validate(document, RAY_SERVICE)
    return document["spec"]


def test_the_schema_refuses_what_kuberay_would(ray_service: dict[str, Any]) -> None:
    document = read(K8S / "rayservice.yaml")
    document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.validate(document, RAY_SERVICE)


def documents() -> list[dict[str, Any]]:
    """Every object of the base and of its components."""
    files = [path for path in K8S.rglob("*.yaml") if path.stem not in NOT_OBJECTS]
    return [each for path in sorted(files) for each in yaml.safe_load_all(path.read_text())]


NOT_OBJECTS = {"kustomization", "references", "config"}


def test_kustomize_knows_every_file() -> None:
    for file in K8S.rglob("kustomization.yaml"):
        named = set(read(file).get("resources", []))
        there = {path.name for path in file.parent.glob("*.yaml") if path.stem not in NOT_OBJECTS}
        assert named == there
    generated = read(K8S / "kustomization.yaml")["configMapGenerator"]
    assert generated == [{"name": "baton-config", "files": ["config.yaml"]}]


def test_kustomize_finds_names_in_the_ray_service(ray_service: dict[str, Any]) -> None:
    def found(node: Any, path: list[str]) -> list[Any]:
        if isinstance(node, list):
            return [leaf for item in node for leaf in found(item, path)]
        if not path:
            return [node]
        return found(node[path[0]], path[1:]) if path[0] in node else []

    references = read(K8S / "references.yaml")
    fields = [*references["images"], *references["nameReference"][0]["fieldSpecs"]]
    named = [found({"spec": ray_service}, field["path"].split("/")) for field in fields]
    assert named == [["baton"], ["baton"] * 3, ["baton-config"], ["baton-config"] * 3]


def test_components_patch_what_is_there(ray_service: dict[str, Any]) -> None:
    (patch,) = read(K8S / "components" / "redis" / "kustomization.yaml")["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    *path, field = operation["path"].split("/")[2:]
    document = read(K8S / "rayservice.yaml")
    assert path == ["rayClusterConfig"]
    document["spec"]["rayClusterConfig"][field] = operation["value"]
    jsonschema.validate(document, RAY_SERVICE)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_it(tmp_path: Path) -> None:
    """With every component, as an overlay does."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    shutil.copytree(K8S, tmp_path / "k8s")
    components = [f"../k8s/components/{path.name}" for path in (K8S / "components").iterdir()]
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": ["../k8s"],
                "components": components,
                "images": [{"name": "baton", "newName": "example.com/baton", "newTag": "1"}],
            }
        )
    )
    built = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True
    ).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(built)}
    assert {"ConfigMap", "RayService", "ServiceMonitor", "ScaledObject"} <= objects.keys()
    service = str(objects["RayService"])
    assert service.count("example.com/baton:1") == 4
    assert service.count(objects["ConfigMap"]["metadata"]["name"]) == 4
    assert "gcsFaultToleranceOptions" in service


def test_objects_fit_kubernetes_own_schemas(ray_service: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    own = [each for each in documents() if "." not in each["apiVersion"].partition("/")[0]]
    own += [each for each in documents() if ".k8s.io/" in each["apiVersion"]]
    groups = [ray_service["rayClusterConfig"]["headGroupSpec"]]
    groups += ray_service["rayClusterConfig"]["workerGroupSpecs"]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}} for _ in groups]
    pods = [pod | {"spec": g["template"]["spec"]} for pod, g in zip(pods, groups, strict=True)]
    assert len(own) >= 8
    for document in own + pods:
        validate(document, "1.33", strict=True)


def test_pods_run_as_a_plain_user(ray_service: dict[str, Any]) -> None:
    cluster = ray_service["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["restartPolicy"] == "Never"  # Ray's autoscaler could not end idle ones
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_front_ends_read_the_secret_that_is_mounted(
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    assert not k8s.anonymous
    assert k8s.router.settings.tls.enabled
    router = ray_container(groups(ray_service)["router"])
    mounts = {mount["name"]: mount["mountPath"] for mount in router["volumeMounts"]}
    for file in (k8s.router.settings.api_keys_file, k8s.router.settings.tls.key_file):
        assert Path(file).parent == Path(mounts["secrets"])
    assert router["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_kubernetes_serves_as_the_other_clusters_do(
    k8s: ClusterConfig, gpu_cluster: ClusterConfig
) -> None:
    assert (k8s.network, k8s.lifecycle) == (gpu_cluster.network, gpu_cluster.lifecycle)
    assert (k8s.prefill.engine, k8s.decode.engine) == (
        gpu_cluster.prefill.engine,
        gpu_cluster.decode.engine,
    )


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
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    labels = {name: group["labels"] for name, group in groups(ray_service).items()}
    assert labels == {name: getattr(k8s, name).placement.labels for name in ("router", *POOLS)}


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
        "router": {"path": "/ready", "port": 8000, "scheme": "HTTPS"},
        "prefill": ray_is_up,
        "decode": ray_is_up,
    }


def test_rayservice_pods_may_finish_their_requests(
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    for group in groups(ray_service).values():
        env = {variable["name"]: variable["value"] for variable in ray_container(group)["env"]}
        drain_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert k8s.lifecycle.drain_s < drain_s < grace_s


def test_rayservice_grows_when_replicas_ask(
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    assert k8s.ray.autoscaling
    assert ray_service["rayClusterConfig"]["enableInTreeAutoscaling"]
    assert ray_service["rayClusterConfig"]["autoscalerOptions"] == {"version": "v2"}


def test_the_service_leads_to_ready_routers(
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    document = read(K8S / "service.yaml")
    service = document["spec"]
    (monitor,) = (d for d in documents() if d["kind"] == "ServiceMonitor")
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels.items() <= document["metadata"]["labels"].items()
    assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {
        p["name"] for p in service["ports"]
    }
    assert service["selector"] == {"ray.io/group": "router"}
    ports = {port["targetPort"] for port in service["ports"]}
    assert ports == {k8s.network.http_port, k8s.network.grpc_port}
    open_ports = ray_container(groups(ray_service)["router"])["ports"]
    assert ports == {port["containerPort"] for port in open_ports}


def test_rays_ports_are_closed(ray_service: dict[str, Any]) -> None:
    assert ray_service["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_guards_select_the_pods_of_the_ray_service(
    ray_service: dict[str, Any], k8s: ClusterConfig
) -> None:
    guards = list(yaml.safe_load_all((K8S / "guards.yaml").read_text()))
    chosen = {}
    for document in guards:
        spec = document["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        chosen[document["kind"], document["metadata"]["name"]] = selector["matchLabels"]
    assert len(chosen) == len(guards)
    for group in groups(ray_service):
        assert chosen["PodDisruptionBudget", f"baton-{group}"] == {"ray.io/group": group}
    assert chosen["NetworkPolicy", "baton-front-ends"] == {"ray.io/group": "router"}
    assert chosen["NetworkPolicy", "baton-inside"] == {"ray.io/is-ray-node": "yes"}
    (front,) = (d for d in guards if d["metadata"]["name"] == "baton-front-ends")
    ports = {port["port"] for rule in front["spec"]["ingress"] for port in rule["ports"]}
    assert ports == {k8s.network.http_port, k8s.network.grpc_port}
