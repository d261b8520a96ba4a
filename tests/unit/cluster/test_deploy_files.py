"""The files under deploy/ match the schemas of the programs that read them, and each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from cluster.serve.builders import read_arguments
from protocol.errors import InvalidRequest
from scripts.image_steps import steps

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
def test_a_head_without_power_is_missed(path: Path) -> None:
    """It closes no connection, and by default Ray looks after five minutes. The server accepts what
    clients send only if it knows their interval."""
    config = read(path)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        for name in ("time", "timeout"):
            assert f"RAY_grpc_client_keepalive_{name}_ms=20000" in commands[0]


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
    assert "baton up ~/baton-configs/gpu-cluster.yaml" in baton  # changes only what differs


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_clients_need_a_key_and_speak_tls(path: Path) -> None:
    up = read(path)["head_start_ray_commands"][1]
    assert "baton keys secure ~/baton-secrets;" in up
    overrides = re.findall(r"--set (\S+)", up)
    config = load_config(DEPLOY / "configs" / "gpu-cluster.yaml", overrides=overrides).config
    assert not config.anonymous
    settings, folder = config.router.settings, Path("~/baton-secrets").expanduser()
    assert settings.api_keys_file == str(folder / "keys.yaml")
    files = settings.tls.cert_file, settings.tls.key_file
    assert files == (str(folder / "tls.crt"), str(folder / "tls.key"))


def firewall(*arguments: str) -> str:
    """What the script would run."""
    script = ["bash", str(DEPLOY / "ray" / "firewall.sh"), *arguments]
    env = {**os.environ, "DRY_RUN": "1"}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def ports_of(path: Path) -> set[str]:
    """The ports that a file of Ray uses, as the firewall names them."""
    config, found = read(path), set()
    for command in (config["head_start_ray_commands"][0], *config["worker_start_ray_commands"]):
        ports = dict(re.findall(r"--([a-z-]*port)=(\d+)", command))
        low, high = (int(ports.pop(f"{end}-worker-port")) for end in ("min", "max"))
        found |= {str(port) for port in range(low, high + 1)} | set(ports.values())
    return found | {*re.findall(r"RAY_HEAD_IP:(\d+)", str(config))}


def each_port(text: str) -> set[str]:
    ports = set[str]()
    for low, high in re.findall(r"(?<![\d.])(\d+)(?:-(\d+))?", text):
        ports |= {str(port) for port in range(int(low), int(high or low) + 1)}
    return ports


@pytest.mark.parametrize("path", RAY_FILES, ids=lambda p: p.name)
def test_the_firewall_opens_the_ports_that_are_used(path: Path, gpu_cluster: ClusterConfig) -> None:
    network = gpu_cluster.network
    clients = {str(network.http_port), str(network.grpc_port)}
    workers = each_port(network.worker_ports)
    kernels = each_port("32768-60999")  # where NCCL's sockets are
    between = ports_of(path) | workers | kernels | {"22"}
    rules = firewall("nft", "10.0.0.0/24", "0.0.0.0/0")
    lists = [each_port(ports) for ports in re.findall(r"dport \{(.*?)\}", rules)]
    assert lists == [between, clients, between - {"22"} | clients]
    made = re.findall(r"--allow (\S+)", firewall("gcp", "net", "10.0.0.0/8"))
    assert [each_port(ports) for ports in made] == [between, clients | {"22"}]
    aws = firewall("aws", "vpc-1", "10.0.0.0/8").splitlines()
    ports = {
        kind: " ".join(a.split("--port ")[1].split()[0] for a in aws if kind in a)
        for kind in ("--source-group", "--cidr")
    }
    assert each_port(ports["--source-group"]) == between
    assert each_port(ports["--cidr"]) == clients | {"22"}


def test_rented_machines_are_behind_the_firewall() -> None:
    """Ray's own security group opens every port between the machines, and SSH to the world."""
    for name, field in (("aws", "SecurityGroupIds"), ("gcp", "tags")):
        types = read(DEPLOY / "ray" / f"{name}.yaml")["available_node_types"]
        assert len({str(node["node_config"][field]) for node in types.values()}) == 1


def tool(name: str) -> str:
    """A checker that is installed beside this Python."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        pytest.skip(f"needs {name}")
    return str(found)


def test_scripts_are_sound() -> None:
    scripts = [*(DEPLOY / "ray").glob("*.sh"), DEPLOY.parent / ".ci" / "run"]
    done = subprocess.run(
        [tool("shellcheck"), *map(str, scripts)], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_sound(path: Path) -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_locked_small_and_without_root(path: Path) -> None:
    done = steps(path.read_text())
    words = [word for word, _ in done]
    assert words.count("FROM") == 2  # what builds stays behind
    last = dict(done[len(words) - words[::-1].index("FROM") :])
    assert last["USER"] == "1000"
    copied = [rest for word, rest in done if word == "COPY"]
    assert copied == ["constraints /locks", "dist /dist", "--from=build /install /usr/local"]
    installs = [rest for word, rest in done if word == "RUN" and "pip install" in rest]
    assert all("--no-cache-dir" in rest for rest in installs)
    locks = {f"/locks/{name}.txt" for name in ("cpu", path.stem)}
    assert set(re.findall(r"/locks/\w+\.txt", " ".join(installs))) == locks
    apt = last["RUN"]
    assert "--no-install-recommends" in apt
    assert "rm -rf /var/lib/apt/lists/*" in apt


def test_builder_arguments(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny}")
    config = read_arguments({"config": str(path), "set": ["decode.replicas=3"]})
    assert config.decode.replicas == 3
    with pytest.raises(InvalidRequest, match=r"args\.config is required"):
        read_arguments({})
    with pytest.raises(InvalidRequest, match=r"args\.colour"):
        read_arguments({"config": str(path), "colour": "red"})
