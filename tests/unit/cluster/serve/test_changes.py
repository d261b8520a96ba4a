"""What a changed configuration, model or version changes in a running cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.load import leaf_paths, load_config
from cluster.membership.table import Pool
from cluster.serve.changes import (
    ALL,
    WORKERS,
    Change,
    Deployed,
    affected,
    describe,
    plan_change,
    weights_stamp,
)
from protocol.errors import InvalidRequest

ONE_EACH = dict.fromkeys(Pool, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    return model


def deployed(folder: Path, *overrides: str) -> dict[Pool, Deployed]:
    text = folder.with_name("c.yaml")
    text.write_text("model: {name: m}")
    config = load_config(text, overrides=overrides).config
    return {pool: describe(config, pool, folder) for pool in Pool}


def planned(folder: Path, *overrides: str, **sizes: int) -> Change:
    before = deployed(folder)
    return plan_change(
        before, deployed(folder, *overrides), ONE_EACH | {Pool(k): v for k, v in sizes.items()}
    )


def replaced(change: Change) -> set[Pool]:
    return {each.pool for each in change.pools if each.reasons}


def test_the_same_again_changes_nothing(folder: Path) -> None:
    assert planned(folder).lines() == []
    again = {pool: Deployed.decoded(d.encoded()) for pool, d in deployed(folder).items()}
    assert again == deployed(folder)
    # The present sizes are of `baton scale` or the autoscaler.
    assert planned(folder, decode=7).lines() == []


@pytest.mark.parametrize(
    ("override", "pools"),
    [
        ("prefill.engine.block_size=32", {Pool.PREFILL}),
        ("decode.tiers.host_bytes=0", {Pool.DECODE}),
        ("decode.worker.max_num_seqs=3", WORKERS),
        ("model.dtype=float32", WORKERS),
        ("transfer.backend=tcp", WORKERS),
        ("network.worker_host=auto", WORKERS),
        ("network.http_port=8001", {Pool.ROUTER}),
        ("model.served_name=other", {Pool.ROUTER}),
        ("router.settings.max_requests=7", {Pool.ROUTER}),
        ("model.max_model_len=100", ALL),
        ("lifecycle.drain_s=7", ALL),
        ("scaling.ttft_s=2", frozenset()),
        ("decode.max_replicas=3", frozenset()),
        ("ray.autoscaling=true", frozenset()),
    ],
)
def test_a_field_replaces_the_pools_that_are_built_from_it(
    folder: Path, override: str, pools: set[Pool]
) -> None:
    change = planned(folder, override)
    assert replaced(change) == pools
    field = override.partition("=")[0]
    assert any(field in line for line in change.lines())
    assert bool(change.live) == (not pools)


def test_every_field_has_its_place() -> None:
    """What is neither of a pool nor read live would be changed in vain."""
    live = {path for path in leaf_paths() if not affected(path)}
    outside = {p for p in live if p.partition(".")[0] in ("model", "transfer", "network", "router")}
    assert outside == {"router.replicas"}


def test_sizes(folder: Path) -> None:
    assert planned(folder, "decode.replicas=3").lines() == ["decode: from 1 to 3 replicas"]
    assert planned(folder, "prefill.replicas=0").lines() == ["prefill: from 1 to 0 replicas"]
    change = planned(folder, "model.dtype=float32", prefill=0)
    assert replaced(change) == {Pool.DECODE}
    assert [each.replicas for each in change.pools] == [1, 1, 1]


def test_changed_files_of_the_model(folder: Path) -> None:
    before, stamp = deployed(folder), weights_stamp(folder)
    (folder / "model.safetensors").write_text("{ }")
    assert weights_stamp(folder) != stamp
    change = plan_change(before, deployed(folder), ONE_EACH)
    assert replaced(change) == WORKERS
    assert "  model.name: the files of the weights have changed" in change.lines()
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(InvalidRequest, match=r"model\.name: has another tokenizer"):
        plan_change(before, deployed(folder), ONE_EACH)


def test_versions(folder: Path) -> None:
    before = deployed(folder)
    newer = {pool: replace(d, build="9.0+abc") for pool, d in before.items()}
    change = plan_change(before, newer, ONE_EACH)
    assert replaced(change) == ALL
    assert all("-> 9.0+abc" in reason for each in change.pools for reason in each.reasons)
    foreign = {pool: replace(d, protocol="ffff") for pool, d in newer.items()}
    with pytest.raises(InvalidRequest, match="their messages differ"):
        plan_change(before, foreign, ONE_EACH)
    change = plan_change(dict.fromkeys(Pool), newer, ONE_EACH)
    assert replaced(change) == ALL  # deployed by other means


def test_another_ray_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"ray\.address: cannot change") as caught:
        planned(folder, "ray.address=auto")
    assert caught.value.param == "ray.address"
