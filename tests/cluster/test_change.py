"""A running cluster gets another configuration and other weights, pool by pool, under load."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cluster.conftest import CHUNKED, PATIENT, Baton
from tests.cluster.load import LONG, TOKENS, ask, load, wait_until
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def settings() -> list[str]:
    ports = [f"network.{name}={free_port()}" for name in ("http_port", "grpc_port")]
    return [*CHUNKED, *PATIENT, *ports, "model.dtype=float32"]


@pytest.fixture(scope="module")
def up(shared_baton: Baton, short_model: Path, settings: list[str]) -> Baton:
    baton = replace(shared_baton, model=short_model)
    baton.up("local-cpu.yaml", *settings)
    return baton


@pytest.fixture(scope="module")
def other_weights(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without what its first layer's MLP adds."""
    folder = tmp_path_factory.mktemp("other") / "smollm2"
    shutil.copytree(short_model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    save_file(tensors, file)
    return folder


def test_a_second_up_changes_nothing(up: Baton, settings: list[str]) -> None:
    before = set(up.workers())
    done = up.run(*up.up_arguments("local-cpu.yaml", *settings))
    assert done.stdout.splitlines()[-1] == "nothing to change"
    assert set(up.workers()) == before


def test_what_a_change_would_do_is_said(up: Baton, settings: list[str]) -> None:
    before = set(up.workers())
    fields = ["decode.engine.kv_memory_bytes=768MiB", "prefill.replicas=2"]
    arguments = up.up_arguments("local-cpu.yaml", *settings, *fields)
    lines = up.run(*arguments, "--dry-run").stdout.splitlines()
    assert lines == [
        "prefill: from 1 to 2 replicas",
        "decode: 1 replaced, one after another, because of",
        "  decode.engine.kv_memory_bytes: 1073741824 -> 805306368",
    ]
    refused = up.run(*arguments, "--set", "ray.num_cpus=3", check=False)
    assert refused.returncode == 2
    assert "ray.num_cpus: cannot change while the cluster runs" in refused.stderr
    assert set(up.workers()) == before


def test_weights_and_settings_change_under_load(
    up: Baton, settings: list[str], other_weights: Path
) -> None:
    """Eight streams while every replica is replaced: none is lost, and each is wholly of the old or
    of the new weights."""
    (old,), before = ask(up, LONG, tokens=TOKENS).token_ids, set(up.workers())
    with load(up, old, clients=8) as running:
        wait_until(lambda: running.finished >= 8)
        usual_s, running.worst_gap_s = running.worst_gap_s, 0.0
        fields = [f"model.name={other_weights}", "lifecycle.drain_s=61"]
        done = up.run(*up.up_arguments("local-cpu.yaml", *settings, *fields))
        assert "decode: 1 replaced, one after another, because of" in done.stdout
        at_end = running.finished
        wait_until(lambda: running.finished >= at_end + 16)
    (new,) = ask(up, LONG, tokens=TOKENS).token_ids
    assert running.errors == []
    assert new != old
    assert {tuple(ids) for ids in running.wrong} == {tuple(new)}
    assert len(running.wrong) >= 8  # those that were asked after the change
    assert not set(up.workers()) & before
    print(
        f"{running.finished} requests; longest gap before {usual_s:.2f} s, "
        f"during the change {running.worst_gap_s:.2f} s"
    )
