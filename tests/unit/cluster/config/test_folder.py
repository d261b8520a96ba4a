"""Files that workers or routers could not read are told before anything starts, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.config import checks
from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from protocol.errors import InvalidRequest
from tests.support.tiny_text import write_model_text

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9000\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model_text(tmp_path)
    save_file({"a": torch.zeros(64)}, str(tmp_path / "model.safetensors"))
    return tmp_path


def config(tmp_path: Path, *overrides: str) -> ClusterConfig:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny}\n")
    return load_config(path, overrides=overrides).config


def refusal(folder: Path, *overrides: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        checks.check_folder(config(folder, *overrides), folder)
    return caught.value


def test_a_good_folder_passes(folder: Path) -> None:
    checks.check_folder(config(folder), folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [POINTER, "", "{", "\x00" * 100])
def test_a_file_that_is_no_such_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    error = refusal(folder)
    assert error.param == "model.name"
    assert str(folder / name) in error.message
    assert ("git-lfs" in error.message) or content != POINTER


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [POINTER, "[]", "[" * 100_000])
def test_settings_that_are_no_json_object_are_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert str(folder / name) in refusal(folder).message


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder).message


def test_a_truncated_or_missing_shard_is_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    names = {"a": "1.safetensors", "b": "2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "1.safetensors").write_bytes(whole)
    assert "2.safetensors" in refusal(folder).message
    (folder / "2.safetensors").write_bytes(whole[:-8])
    assert "2.safetensors is truncated" in refusal(folder).message


def test_a_template_that_does_not_parse_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "chat template" in refusal(folder).message


def test_traces_need_their_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "router.settings.otlp_endpoint=http://127.0.0.1:4318"
    checks.check_folder(config(folder, endpoint), folder)
    monkeypatch.setattr(checks, "has_tracing", lambda: False)
    assert refusal(folder, endpoint).param == "router.settings.otlp_endpoint"


def test_yaml_may_not_be_nested_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 50_000)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        load_config(path)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_disk_tier_needs_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    checks.check_fields(config(tmp_path, f"decode.tiers.disk_path={tmp_path}/new/folder"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(InvalidRequest) as caught:
        checks.check_fields(config(tmp_path, f"decode.tiers.disk_path={tmp_path}/{name}"))
    assert caught.value.param == "decode.tiers.disk_path"
    assert f"{tmp_path}/file is not a folder" in caught.value.message
    elsewhere = ("ray.address=h:1", f"decode.tiers.disk_path={tmp_path}/{name}")
    checks.check_fields(config(tmp_path, *elsewhere))
