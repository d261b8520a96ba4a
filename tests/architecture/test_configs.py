"""Every configuration that the project ships loads, and its settings fit each other."""

from pathlib import Path

import pytest

from cluster.config_load import load_config
from protocol.ids import Role

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "deploy" / "configs").glob("*.yaml"))


def test_the_demo_configuration_is_there():
    assert "local-cpu.yaml" in {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_it_loads_without_a_word(path):
    loaded = load_config(path, environ={})
    assert loaded.warnings == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_both_pools_are_built_for_each_other(path):
    config = load_config(path, environ={}).config
    prefill, decode = (config.engine_config(role, Path("model")) for role in Role)
    assert prefill.dtype == decode.dtype
    assert config.decode.replicas >= 1
    for role in Role:
        pool = config.pool(role)
        assert (pool.placement.gpus > 0) == (pool.engine.device != "cpu")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_it_begins_by_saying_what_it_is_for(path):
    assert path.read_text().startswith("# ")
