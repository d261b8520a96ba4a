"""Every configuration that the project ships loads, and its settings fit each other."""

import re
from pathlib import Path

import pytest
import yaml

from cluster.config.load import leaf_paths, load_config
from protocol.ids import Role

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "deploy" / "configs").glob("*.yaml"))
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("deploy/*")]
)
SECTIONS = "model|prefill|decode|router|transfer|network|ray|lifecycle|engine|worker|placement"


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_fields_that_exist(path):
    """A field is written with its path, or from its section on."""
    known = {f".{field}" for field in leaf_paths()}
    text = path.read_text()
    named = re.findall(rf"(?<![\w./])(?:{SECTIONS})(?:\.[a-z_]+)+(?==|`|: )", text)
    unknown = {
        name
        for name in named
        if not any(field.endswith(f".{name}") or f".{name}." in field for field in known)
    }
    assert unknown == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_parts_of_configurations_on_pages_load(path, tmp_path):
    for part in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
        tree = yaml.safe_load(part)
        if "keys" in tree:  # an API key file
            continue
        whole = tmp_path / "config.yaml"
        whole.write_text(yaml.safe_dump({"model": {"name": "model"}} | tree))
        assert load_config(whole, environ={}).warnings == ()
