"""What is made from the code and committed is what would be made now."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("proto", ROOT / "scripts" / "proto.py")
proto = importlib.util.module_from_spec(spec)
spec.loader.exec_module(proto)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["scripts/proto.py", "--check"], id="make proto"),
        pytest.param(["scripts/docs.py", "--check"], id="make docs"),
    ],
)
def test_made_files_are_current(command):
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@cache
def compiled():
    with tempfile.TemporaryDirectory() as folder:
        return proto.generate(Path(folder)).SerializeToString()


def described():
    """The description of the committed messages, as a value of its own."""
    return descriptor_pb2.FileDescriptorSet.FromString(compiled())


def message_of(files, name):
    return next(message for message in files.file[0].message_type if message.name == name)


def test_the_contract_is_what_the_messages_have():
    assert proto.contract_of(described()) == proto.CONTRACT.read_text().splitlines()
    assert len(proto.CONTRACT.read_text().splitlines()) > 180


BREAKS = {
    "renamed": lambda files: setattr(message_of(files, "Choice").field[0], "name", "place"),
    "renumbered": lambda files: setattr(message_of(files, "Choice").field[0], "number", 77),
    "retyped": lambda files: setattr(message_of(files, "Choice").field[0], "type", 5),
    "relabelled": lambda files: setattr(message_of(files, "Choice").field[0], "label", 3),
    "presence": lambda files: (
        message_of(files, "Model").field[0].__setattr__("proto3_optional", True)
    ),
    "removed": lambda files: message_of(files, "Choice").field.pop(),
    "method": lambda files: files.file[0].service[0].method.pop(),
    "stream": lambda files: setattr(files.file[0].service[0].method[0], "server_streaming", False),
    "package": lambda files: setattr(files.file[0], "package", "baton.v2"),
}


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_a_change_that_breaks_clients_is_seen(change):
    files = described()
    change(files)
    assert proto.broken_lines(proto.contract_of(files))


def test_an_addition_breaks_nothing():
    files = described()
    message_of(files, "Choice").field.add(
        name="more", number=900, type=3, label=1, json_name="more"
    )
    assert proto.broken_lines(proto.contract_of(files)) == []
