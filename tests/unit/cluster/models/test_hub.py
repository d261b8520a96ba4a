"""Fetching from the Hugging Face Hub, with its client library and a stub server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import EXIT_FAILED, EXIT_USAGE, main
from cluster.models.store import find_model, get_model, is_hub_name

COMMIT = "0" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "README.md": b"unused",
    "onnx/model.onnx": b"unused",
    "pytorch_model.bin": b"unused",
}


class Hub(ThreadingHTTPServer):
    """Holds one model, `org/tiny`, with the revision `v1`. Refuses files in `refused`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused: set[str] = set()
        self.fetched: list[str] = []
        self.files = dict(FILES)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in (f"/api/models/org/tiny/revision/{r}" for r in ("main", "v1")):
            names = [{"rfilename": name} for name in self.server.files]
            self.reply(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode())
        elif path.startswith("/api/models/org/tiny/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040}"}
                for name, data in self.server.files.items()
            ]
            self.reply(json.dumps(files).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.split("/", 5)[5]
            if name in self.server.refused:
                self.reply(b"", status=403)
                return
            if self.command == "GET":
                self.server.fetched.append(name)
            data = self.server.files[name]
            self.reply(data, **{"ETag": f'"{len(data):040}"', "X-Repo-Commit": COMMIT})
        else:
            missing = "RevisionNotFound" if "org/tiny" in path else "RepoNotFound"
            self.reply(b"", status=404, **{"X-Error-Code": missing})

    def reply(self, data: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@v1"])
def test_a_model_is_fetched_once_with_the_files_that_are_read(
    name: str, hub: Hub, home: Path
) -> None:
    folder = get_model(name)
    assert folder == home / "models" / name == find_model(name) == get_model(name)
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == set(FILES) - {"README.md", "onnx/model.onnx", "pytorch_model.bin"}
    assert sorted(hub.fetched) == sorted(found)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_failed_download_is_continued(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.refused = {"model.safetensors"}
    assert main(["models", "get", "org/tiny"]) == EXIT_FAILED
    assert "fetching org/tiny failed: " in (error := capsys.readouterr().err)
    assert "The same command continues the download" in error
    hub.refused = set()
    before = list(hub.fetched)
    assert "config.json" in before
    assert main(["models", "get", "org/tiny"]) == 0
    assert not set(hub.fetched[len(before) :]) & set(before), "fetched again"
    assert main(["models", "list"]) == 0
    assert "org/tiny" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["org/other", "org/tiny@v2"])
def test_an_unknown_model_or_revision_is_named(
    name: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "get", name]) == EXIT_USAGE
    assert f"the Hub has no model '{name}'" in capsys.readouterr().err


def test_a_model_without_safetensors_is_refused(
    hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.files["model.safetensors"]
    assert main(["models", "get", "org/tiny"]) == EXIT_FAILED
    assert "org/tiny has no config.json with *.safetensors" in capsys.readouterr().err
    assert not (home / "models" / "org").exists() or not list((home / "models" / "org").iterdir())


def test_without_a_network_the_error_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["models", "get", "org/tiny"]) == EXIT_FAILED
    error = [line for line in capsys.readouterr().err.splitlines() if "baton: error" in line]
    assert len(error) == 1
    assert "fetching org/tiny failed: " in error[0]
    assert "refused" in error[0]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("org/name", True),
        ("Org-1/na.me_2@v1.0", True),
        ("name", False),
        ("/org/name", False),
        ("./org/name", False),
        ("../name", False),
        ("a/b/c", False),
        ("org/name@", False),
        ("org/name@../x", False),
    ],
)
def test_names_on_the_hub(name: str, known: bool) -> None:
    assert is_hub_name(name) == known
