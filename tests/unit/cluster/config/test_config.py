"""Errors of a configuration name the field."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

from cluster.config.checks import check_config, warnings_of
from cluster.config.load import RESERVED, env_name, leaf_paths, load_config
from cluster.config.schema import DERIVED, ClusterConfig
from kv_transfer.config import ChecksumKind
from protocol.errors import InvalidRequest
from protocol.ids import Role

SMALLEST = "model: {name: tiny}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(SMALLEST)
    return path


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A folder whose config.json describes 9 query and 3 KV heads."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 144,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(path: Path, *overrides: str, **environ: str) -> ClusterConfig:
    return load_config(path, overrides=overrides, environ=environ).config


def test_defaults(base: Path) -> None:
    config = load(base)
    assert (config.model.name, config.model.dtype) == ("tiny", "bfloat16")
    assert (config.prefill.engine.block_size, config.decode.engine.block_size) == (16, 16)
    assert (config.prefill.replicas, config.decode.replicas, config.router.replicas) == (1, 1, 1)
    assert (config.network.http_port, config.network.grpc_port) == (8000, 9000)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("model.dtype=float32", lambda c: c.model.dtype, "float32"),
        ("model.name=123", lambda c: c.model.name, "123"),
        ("model.max_model_len=64", lambda c: c.model.max_model_len, 64),
        ("model.max_model_len=16_384", lambda c: c.model.max_model_len, 16_384),
        ("decode.worker.stall_s=1_000.5", lambda c: c.decode.worker.stall_s, 1000.5),
        ("model.max_model_len=none", lambda c: c.model.max_model_len, None),
        ("model.aliases=a, b", lambda c: c.model.aliases, ("a", "b")),
        ("model.aliases=[x]", lambda c: c.model.aliases, ("x",)),
        ("decode.engine.kv_memory_bytes=2GiB", lambda c: c.decode.engine.kv_memory_bytes, 2 << 30),
        (
            "decode.engine.kv_memory_bytes=1.5 MB",
            lambda c: c.decode.engine.kv_memory_bytes,
            1_500_000,
        ),
        ("decode.engine.kv_memory_bytes=77", lambda c: c.decode.engine.kv_memory_bytes, 77),
        ("decode.worker.watermark=0.25", lambda c: c.decode.worker.watermark, 0.25),
        ("decode.worker.stall_s=9", lambda c: c.decode.worker.stall_s, 9.0),
        ("transfer.checksum=none", lambda c: c.transfer.checksum, ChecksumKind.NONE),
        ("router.settings.reuse_port=False", lambda c: c.router.settings.reuse_port, False),
        ("prefill.placement.labels={pool: p}", lambda c: c.prefill.placement.labels, {"pool": "p"}),
        ("prefill.placement.labels.pool=p", lambda c: c.prefill.placement.labels, {"pool": "p"}),
        ("prefill.placement.resources.x=2", lambda c: c.prefill.placement.resources, {"x": 2.0}),
    ],
)
def test_override_is_typed(base: Path, override: str, read, value) -> None:
    assert read(load(base, override)) == value


def test_order_of_precedence(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny, dtype: float16}\nprefill: {replicas: 2}\n")
    environ = {"BATON_MODEL_DTYPE": "bfloat16", "BATON_PREFILL_REPLICAS": "3"}
    assert load(path).model.dtype == "float16"
    assert load(path, **environ).prefill.replicas == 3
    assert load(path, **environ).model.dtype == "bfloat16"
    assert load(path, "model.dtype=float32", **environ).model.dtype == "float32"


def test_space_around_numbers_of_the_environment_is_ignored(base: Path) -> None:
    """Values read from files end with a line break."""
    environ = {
        "BATON_MODEL_MAX_MODEL_LEN": "64\n",
        "BATON_DECODE_WORKER_STALL_S": " 9.5 ",
        "BATON_ROUTER_SETTINGS_REUSE_PORT": "false\n",
    }
    config = load(base, **environ)
    assert (config.model.max_model_len, config.decode.worker.stall_s) == (64, 9.5)
    assert config.router.settings.reuse_port is False
    with pytest.raises(InvalidRequest, match=r"a whole number, got '_6 4' \(str\)"):
        load(base, BATON_MODEL_MAX_MODEL_LEN="_6 4")


def test_every_field_has_one_environment_variable() -> None:
    names = [env_name(path) for path in leaf_paths()]
    assert len(names) == len(set(names))
    assert not RESERVED & set(names)
    assert env_name("decode.worker.max_num_seqs") == "BATON_DECODE_WORKER_MAX_NUM_SEQS"


def test_every_variable_that_is_read_is_known() -> None:
    root = Path(__file__).resolve().parents[4]
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    named = {
        name
        for package in folders["targets"]["wheel"]["packages"]
        for path in (root / package).rglob("*.py")
        for name in re.findall(r'"(BATON_[A-Z_]*[A-Z])"', path.read_text())
    }
    assert {"BATON_HOME", "BATON_NATIVE_KERNELS"} <= named <= RESERVED


def test_unknown_environment_variable_warns_with_a_suggestion(base: Path) -> None:
    environ = {"BATON_MODEL_DTYP": "x", "BATON_HOME": "/x", "OTHER": "1"}
    warnings = load_config(base, environ=environ).warnings
    assert len(warnings) == 1
    assert "BATON_MODEL_DTYP " in warnings[0]
    assert "BATON_MODEL_DTYPE" in warnings[0]


@pytest.mark.parametrize(
    ("override", "param", "words"),
    [
        # names
        ("model.dtpye=float32", "model.dtpye", "did you mean model.dtype?"),
        ("modle.name=x", "modle", "did you mean model?"),
        ("prefill.tp=2", "prefill.tp", "did you mean prefill.engine.tp_size?"),
        ("decode.threads=2", "decode.threads", "did you mean decode.engine.num_threads?"),
        ("router.http_port=1", "router.http_port", "did you mean network.http_port?"),
        ("decode.worker.max_seqs=1", "decode.worker.max_seqs", "decode.worker.max_num_seqs?"),
        ("qqq=1", "qqq", "no such field"),
        # fields that belong elsewhere
        ("decode.engine.dtype=float32", "decode.engine.dtype", "model.dtype"),
        ("model.block_size=8", "model.block_size", "no such field"),
        (
            "prefill.engine.max_running=8",
            "prefill.engine.max_running",
            "is set by prefill.worker.max_num_seqs:",
        ),
        ("prefill.engine.model_path=/x", "prefill.engine.model_path", "model.name"),
        ("router.settings.model_path=/x", "router.settings.model_path", "model.name"),
        ("decode.worker.host=x", "decode.worker.host", "network.worker_host"),
        ("transfer.host=x", "transfer.host", "network.worker_host"),
        # types
        ("prefill.replicas=two", "prefill.replicas", "whole number"),
        ("prefill.replicas=1.5", "prefill.replicas", "whole number"),
        ("prefill.replicas=true", "prefill.replicas", "whole number"),
        ("prefill.replicas=", "prefill.replicas", "whole number"),
        ("decode.worker.stall_s=soon", "decode.worker.stall_s", "number"),
        ("decode.worker.stall_s=inf", "decode.worker.stall_s", "finite"),
        ("decode.worker.stall_s=nan", "decode.worker.stall_s", "finite"),
        ("router.settings.reuse_port=yes", "router.settings.reuse_port", "true or false"),
        (
            "transfer.backend=carrier-pigeon",
            "transfer.backend",
            "expected one of auto, tcp, nccl, cuda_ipc, got",
        ),
        ("model=tiny", "model", "expected a section"),
        ("model.name.x=1", "model.name.x", "model.name is a value"),
        ("prefill.placement.labels=x", "prefill.placement.labels", "expected a map"),
        ("prefill.placement.resources.x=many", "prefill.placement.resources.x", "number"),
        ("model.aliases={a: b}", "model.aliases", "expected a list"),
        ("model.aliases=[a", "model.aliases", "not valid YAML"),
        ("prefill.placement.env={A: b, A: c}", "prefill.placement.env", "'A' is given twice"),
        # ranges, as each package states them
        ("prefill.replicas=-1", "prefill.replicas", "at least 0"),
        ("router.replicas=0", "router.replicas", "at least 1"),
        ("network.http_port=70000", "network.http_port", "65535"),
        ("network.grpc_port=-1", "network.grpc_port", "65535"),
        ("network.worker_host=0.0.0.0", "network.worker_host", "one address of a node"),
        ("network.worker_host=::", "network.worker_host", "one address of a node"),
        ("network.worker_host=", "network.worker_host", "one address of a node"),
        ("prefill.placement.cpus=-1", "prefill.placement.cpus", "at least 0"),
        ("prefill.placement.resources={x: 0}", "prefill.placement.resources.x", "above 0"),
        ("prefill.placement.memory_bytes=0", "prefill.placement.memory_bytes", "at least 1"),
        ("decode.worker.max_num_seqs=0", "decode.worker.max_num_seqs", "at least 1"),
        ("decode.worker.watermark=1.0", "decode.worker.watermark", "[0, 1)"),
        ("decode.worker.stall_s=0", "decode.worker.stall_s", "positive"),
        ("decode.engine.tp_size=0", "decode.engine.tp_size", "at least 1"),
        ("decode.engine.num_blocks=0", "decode.engine.num_blocks", "at least 1"),
        ("transfer.lease_s=0", "transfer.lease_s", "positive"),
        ("router.settings.max_requests=0", "router.settings.max_requests", "positive"),
        ("lifecycle.heartbeat_s=0", "lifecycle.heartbeat_s", "above 0"),
        ("lifecycle.expiry_s=1", "lifecycle.expiry_s", "twice heartbeat_s"),
        ("ray.num_cpus=0", "ray.num_cpus", "at least 1"),
        ("ray.object_store_bytes=1", "ray.object_store_bytes", "80 MiB"),
        ("ray.address=", "ray.address", "local"),
    ],
)
def test_bad_field_is_named(base: Path, override: str, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(base, override)
    assert caught.value.param == param
    assert param in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("override", ["model.dtype", "=x", ""])
def test_malformed_override(base: Path, override: str) -> None:
    with pytest.raises(InvalidRequest, match="expected FIELD=VALUE") as caught:
        load(base, override)
    assert caught.value.param == "--set"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "not valid YAML"),
        ("- a\n- b\n", "sections of fields"),
        ("", "sections of fields"),
        ("model: {name: a, name: b}", "given twice"),
        ("? [model]\n: {name: a}", "unhashable key"),
        ("model: {name: a}\nmodel: {name: b}", "given twice"),
        ("prefill: {replicas: 1}", "model.name: is required"),
        ("model: {}", "model.name: is required"),
        ("model: {name: tiny}\nprefill: 3", "prefill: expected a section"),
        ("model: {name: tiny}\nprefill: {engine: [1]}", "prefill.engine: expected a section"),
        ("model: {name: [x]}", "model.name: expected str"),
        ("model: {name: true}", "model.name: expected str"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load(path)
    assert words in caught.value.message


def test_missing_and_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no configuration file"):
        load(tmp_path / "none.yaml")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="cannot read"):
        load(binary)


def test_empty_section_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny}\nprefill:\n")
    assert load(path).prefill == load(path).decode
    assert load(path, "prefill.replicas=2").prefill.replicas == 2


@pytest.mark.parametrize(
    ("overrides", "param", "words"),
    [
        (["decode.replicas=0"], "decode.replicas", "at least 1"),
        (["network.grpc_port=8000"], "network.grpc_port", "same as network.http_port"),
        (["network.metrics_port=9000"], "network.metrics_port", "same as network.grpc_port"),
        (["router.replicas=2", "network.http_port=0"], "network.http_port", "must be given"),
        (["router.replicas=2", "network.grpc_port=0"], "network.grpc_port", "must be given"),
        (["router.replicas=2", "network.metrics_port=9100"], "network.metrics_port", "must be 0"),
        (
            ["router.replicas=2", "router.settings.reuse_port=false"],
            "router.settings.reuse_port",
            "must be true",
        ),
        (["model.max_model_len=257"], "model.max_model_len", "the model's 256"),
        (["model.max_model_len=1"], "model.max_model_len", "at least 2"),
        (["model.dtype=float31"], "model.dtype", "float32, bfloat16, float16"),
        (["prefill.engine.tp_size=4"], "prefill.engine.tp_size", "allowed: 1, 2, 3, 9"),
        (["decode.engine.tp_size=5"], "decode.engine.tp_size", "9 query and 3 KV heads"),
        (["decode.engine.device=cuda"], "decode.placement.gpus", "must be 1"),
        (
            ["decode.engine.device=cuda", "decode.placement.gpus=1.5"],
            "decode.placement.gpus",
            "must be 1",
        ),
        (
            ["decode.engine.device=cuda", "decode.placement.gpus=0.5"],
            "decode.engine.kv_memory_bytes",
            "share a GPU",
        ),
        (["decode.engine.device=cuda:1"], "decode.engine.device", "Ray picks the GPU"),
        (["transfer.backend=nccl"], "transfer.backend", "needs GPUs, but prefill"),
        (
            ["decode.engine.device=cuda", "decode.placement.gpus=1", "transfer.backend=tcp"],
            "transfer.backend",
            "needs CPUs, but decode",
        ),
        (["prefill.engine.device=tpu"], "prefill.engine.device", "'cpu' or 'cuda'"),
        (
            ["decode.engine.device=cuda", "decode.placement.gpus=1"],
            "prefill.engine.device",
            "is 'cpu', but decode.engine.device is 'cuda'",
        ),
        (["prefill.placement.gpus=1"], "prefill.placement.gpus", "device is 'cpu'"),
        (
            ["scaling.roles=true", "prefill.max_replicas=3"],
            "scaling.roles",
            "prefill.max_replicas is set",
        ),
        (["scaling.roles=true", "decode.min_replicas=0"], "decode.min_replicas", "at least 1"),
        (["decode.worker.heartbeat_s=1.3"], "router.settings.silence_s", "4 x heartbeat_s (1.3)"),
    ],
)
def test_cross_check_names_the_field(
    base: Path, model_path: Path, overrides: list[str], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_config(load(base, *overrides), model_path)
    assert caught.value.param == param
    assert words in caught.value.message


def test_good_config_passes(base: Path, model_path: Path) -> None:
    check_config(load(base), model_path)
    check_config(load(base, "prefill.engine.tp_size=3", "decode.engine.tp_size=9"), model_path)
    check_config(load(base, "prefill.replicas=0"), model_path)
    check_config(load(base, "network.http_port=0", "network.grpc_port=0"), model_path)


def test_pools_of_two_precisions_name_a_family(base: Path, model_path: Path) -> None:
    mixed = ("prefill.engine.quantization=fp8", "decode.engine.quantization=int4")
    with pytest.raises(InvalidRequest, match="differ in precision") as caught:
        check_config(load(base, *mixed), model_path)
    assert caught.value.param == "model.kv_family"
    check_config(load(base, *mixed, "model.kv_family=tiny"), model_path)
    check_config(load(base, *mixed, "prefill.replicas=0"), model_path)
    config = load(base, "model.quantization=int8", mixed[1])
    kinds = [config.engine_config(role, model_path).quantization for role in Role]
    assert kinds == ["int8", "int4"]


def test_one_pool_may_have_kv_in_codes(base: Path, model_path: Path) -> None:
    config = load(base, "decode.engine.kv_dtype=fp8")
    check_config(config, model_path)
    kinds = [config.engine_config(role, model_path).kv_type for role in (Role.PREFILL, Role.DECODE)]
    assert kinds == [config.model.dtype, "float8_e4m3fn"]
    both = load(base, "model.kv_dtype=fp8")
    assert {both.engine_config(role, model_path).kv_dtype for role in Role} == {"fp8"}


def test_a_pool_has_its_own_checkpoint_of_the_same_model(
    base: Path, model_path: Path, tmp_path: Path
) -> None:
    stated = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    raw = json.loads((model_path / "config.json").read_text())

    def checked(changes: dict[str, object], *overrides: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        config = load(base, f"decode.model={tmp_path}", "model.kv_family=tiny", *overrides)
        paths = {Role.PREFILL: model_path, Role.DECODE: Path(config.model_name(Role.DECODE))}
        check_config(config, model_path, paths)

    checked({"quantization_config": stated})
    with pytest.raises(InvalidRequest, match="another model"):
        checked({"quantization_config": stated, "rope_theta": 7.0})
    with pytest.raises(InvalidRequest, match="quantised already") as caught:
        checked({"quantization_config": stated}, "decode.engine.quantization=int8")
    assert caught.value.param == "decode.engine.quantization"


def test_an_empty_pool_needs_no_device(base: Path, model_path: Path) -> None:
    on_gpu = ("decode.engine.device=cuda", "decode.placement.gpus=1", "transfer.backend=nccl")
    check_config(load(base, "prefill.replicas=0", *on_gpu), model_path)
    with pytest.raises(InvalidRequest, match=r"^transfer\.backend: nccl needs GPUs, but prefill"):
        check_config(load(base, *on_gpu), model_path)


def test_unserved_model_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherModel"]}))
    with pytest.raises(InvalidRequest, match="OtherModel") as caught:
        check_config(load(base), tmp_path)
    assert caught.value.param == "model.name"


def test_pools_may_differ_in_the_size_of_their_blocks(base: Path, model_path: Path) -> None:
    config = load(base, "prefill.engine.block_size=32", "decode.engine.block_size=64")
    check_config(config, model_path)
    sizes = [config.engine_config(role, model_path).block_size for role in Role]
    assert sizes == [32, 64]
    with pytest.raises(InvalidRequest) as caught:
        load(base, "decode.engine.block_size=0")
    assert caught.value.param == "decode.engine.block_size"


def test_sections_that_share_a_value_get_the_same(base: Path) -> None:
    config = load(base, "model.dtype=float32", "model.max_model_len=100")
    engines = [config.engine_config(role, Path("/m/tiny")) for role in Role]
    for engine in engines:
        assert (engine.dtype, engine.max_model_len) == ("float32", 100)
        assert engine.model_path == "/m/tiny"
    router = config.router_config(Path("/m/tiny"))
    assert (router.model_path, router.served_model_name, router.max_model_len) == (
        "/m/tiny",
        "tiny",
        100,
    )
    assert config.worker_config(Role.DECODE, "1.2.3.4").host == "1.2.3.4"
    assert config.transfer_config("1.2.3.4").host == "1.2.3.4"


def test_engines_have_room_for_the_largest_step_of_their_workers(base: Path) -> None:
    config = load(
        base, "decode.worker.max_num_seqs=300", "decode.worker.max_num_batched_tokens=900"
    )
    engine = config.engine_config(Role.DECODE, Path("/m/tiny"))
    assert (engine.max_running, engine.max_step_tokens) == (300, 900)


def test_another_role_stays_within_what_the_engine_was_built_for(base: Path) -> None:
    sizes = ["max_num_seqs=8", "max_num_batched_tokens=900"]
    prefill = [f"prefill.worker.{size}" for size in sizes]
    config = load(base, *prefill, "decode.worker.max_num_seqs=300", "decode.worker.watermark=0.3")
    own, other = (config.worker_config(r, "h", home=Role.PREFILL) for r in Role)
    assert (own.max_num_seqs, own.max_num_batched_tokens) == (8, 900)
    assert (other.max_num_seqs, other.max_num_batched_tokens) == (8, 512)
    assert (own.watermark, other.watermark, other.host) == (0.01, 0.3, "h")


def test_every_derived_field_exists() -> None:
    paths = set(leaf_paths())
    for (cls, name), source in DERIVED.items():
        assert name in {f.name for f in dataclasses.fields(cls)}
        assert source in paths or f"prefill{source}" in paths


def test_files_of_routers_become_absolute_paths(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(
        base,
        "router.settings.chat_template=chat.jinja",
        "router.settings.tls={cert_file: a.crt, key_file: /etc/a.key}",
    ).router.settings
    assert settings.chat_template == str(tmp_path / "chat.jinja")
    assert settings.tls.cert_file == str(tmp_path / "a.crt")
    assert settings.tls.key_file == "/etc/a.key"
    assert settings.api_keys_file == ""


@pytest.mark.parametrize("source", [None, "{% if %}"])
def test_a_chat_template_that_does_not_load_is_refused_before_the_start(
    base: Path, model_path: Path, tmp_path: Path, source: str | None
) -> None:
    file = tmp_path / "chat.jinja"
    if source is not None:
        file.write_text(source)
    config = load(base, f"router.settings.chat_template={file}")
    with pytest.raises(InvalidRequest) as error:
        check_config(config, model_path)
    assert error.value.param == "router.settings.chat_template"


@pytest.mark.parametrize(
    ("overrides", "anonymous"),
    [
        ([], False),
        (["network.host=localhost"], False),
        (["network.host=::1"], False),
        (["network.host=0.0.0.0"], True),
        (["network.host=gateway.example"], True),
        (["network.host=0.0.0.0", "router.settings.api_keys_file=keys.yaml"], False),
        (
            [
                "network.host=0.0.0.0",
                "router.settings.tls={cert_file: a, key_file: b, client_ca_file: c}",
            ],
            False,
        ),
    ],
)
def test_anonymous_callers_on_the_network_are_warned_of_and_get_no_admin_service(
    base: Path, overrides: list[str], anonymous: bool
) -> None:
    config = load(base, *overrides)
    assert any("Admin service is off" in text for text in warnings_of(config)) == anonymous
    assert config.router_config(Path("/m/tiny")).admin_enabled != anonymous


def test_kv_pools_larger_than_the_memory_are_refused(
    base: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.config.checks.available_memory", lambda: 20 << 30)
    sizes = ("prefill.engine.kv_memory_bytes=8GiB", "decode.engine.kv_memory_bytes=11GiB")
    check_config(load(base, *sizes), model_path)
    check_config(load(base, *sizes, "decode.replicas=2", "ray.address=h:1"), model_path)
    for more in ("decode.replicas=2", "decode.engine.tp_size=3"):
        with pytest.raises(InvalidRequest, match=r"take .* GiB, but this machine has 20") as caught:
            check_config(load(base, *sizes, more), model_path)
        assert caught.value.param == "decode.engine.kv_memory_bytes"
    with pytest.raises(InvalidRequest, match="do not hold one KV block") as caught:
        check_config(load(base, "prefill.engine.kv_memory_bytes=1"), model_path)
    assert caught.value.param == "prefill.engine.kv_memory_bytes"
