"""Generate the Python code of every `*.proto` in protocol/wire: `python scripts/proto.py`.

Runs protoc from the repository's root with `-I.`, so that a file's path is its import path and the
generated code needs no editing. With `--check` nothing is written; the exit status is 1 when a
committed file differs from what would be generated.

`protocol/wire/contract.txt` lists every method and field that clients may rely on. A change that
removes or alters one of its lines breaks clients: it is refused (exit status 1) unless
`--breaking` says that this is meant.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "protocol" / "wire" / "contract.txt"


def main(argv: list[str] | None = None) -> int:
    """Generate or check; the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/proto.py")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    parser.add_argument("--breaking", action="store_true", help="allow changes that break clients")
    options = parser.parse_args(argv)
    check: bool = options.check
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        described = generate(out)
        contract = contract_of(described)
        broken = [] if options.breaking else broken_lines(contract)
        for line in broken:
            sys.stderr.write(f"breaks clients: {line}\n")
        if broken:
            return 1
        made = out / CONTRACT.relative_to(ROOT)
        made.write_text("".join(f"{line}\n" for line in contract))
        stale = list(_differing(out))
        if not check:
            for path, text in stale:
                path.write_bytes(text)
    for path, _ in stale:
        sys.stderr.write(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}\n")
    return 1 if check and stale else 0


def generate(out: Path) -> descriptor_pb2.FileDescriptorSet:
    """Write the code; the files' descriptions."""
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("protocol/wire/*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
        command.append(f"--descriptor_set_out={file.name}")
        subprocess.run(command, cwd=ROOT, check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(Path(file.name).read_bytes())


def contract_of(files: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """A line for each method and field, with everything that clients rely on."""
    lines = []
    for file in files.file:
        for service in file.service:
            for method in service.method:
                stream = ["stream " if on else "" for on in _streaming(method)]
                lines.append(
                    f"{file.package}.{service.name}.{method.name}"
                    f"({stream[0]}{method.input_type}) {stream[1]}{method.output_type}"
                )
        for message in file.message_type:
            lines += _fields(message, f"{file.package}.{message.name}")
    return sorted(lines)


def _streaming(method: descriptor_pb2.MethodDescriptorProto) -> tuple[bool, bool]:
    return method.client_streaming, method.server_streaming


def _fields(message: descriptor_pb2.DescriptorProto, path: str) -> Iterator[str]:
    for field in message.field:
        kind = field.type_name or field.Type.Name(field.type).removeprefix("TYPE_").lower()
        label = field.Label.Name(field.label).removeprefix("LABEL_").lower()
        if field.proto3_optional:
            label = "explicit"
        elif field.HasField("oneof_index"):
            label = f"oneof {message.oneof_decl[field.oneof_index].name}"
        yield f"{path}.{field.name} = {field.number} {label} {kind} {field.json_name}"
    for nested in message.nested_type:
        yield from _fields(nested, f"{path}.{nested.name}")


def broken_lines(contract: Iterable[str]) -> list[str]:
    """Lines of the committed contract that are not in this one."""
    promised = CONTRACT.read_text().splitlines() if CONTRACT.exists() else []
    return [line for line in promised if line not in set(contract)]


def _differing(out: Path) -> Iterator[tuple[Path, bytes]]:
    for made in sorted(path for path in out.rglob("*") if path.is_file()):
        path, text = ROOT / made.relative_to(out), made.read_bytes()
        if not path.exists() or path.read_bytes() != text:
            yield path, text


if __name__ == "__main__":
    sys.exit(main())
