"""`baton usage` reads what routers log."""

from __future__ import annotations

import csv
import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.cli.usage import report
from observability.logging import KeyValueFormatter
from protocol.ids import Role
from router.auth.keys import hashed
from router.dispatch.telemetry import access_log
from tests.support.router_front_ends import MakeFrontEnds
from tests.support.stub_workers import StubFleet


async def test_the_access_log_becomes_a_table(
    fleet: StubFleet,
    make_front_ends: MakeFrontEnds,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "router.log"
    handler = logging.FileHandler(log)
    handler.setFormatter(KeyValueFormatter())
    access_log.addHandler(handler)
    monkeypatch.setattr(logging.getLogger("baton"), "handlers", [])
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        + "".join(f"- {{name: {n}, hash: '{hashed('sk-' + n)}'}}\n" for n in ("ann", "bob"))
    )
    await fleet.add(Role.DECODE, cached_tokens=2)
    try:
        async with make_front_ends(fleet, api_keys_file=str(keys), access_log=True) as front_ends:
            calls: list[tuple[str, dict[str, Any]]] = [
                ("ann", {"max_tokens": 3}),
                ("ann", {"max_tokens": 4}),
                ("bob", {"max_tokens": 2}),
                ("bob", {"max_tokens": 10**6}),
            ]
            for name, fields in calls:
                headers = {"x-api-key": f"sk-{name}", "x-request-id": 'x key="bob" output_tokens=9'}
                url = front_ends.url + "/v1/completions"
                body = {"prompt": [30, 31, 32, 33, 34], **fields}
                async with front_ends.http.post(url, json=body, headers=headers) as response:
                    assert response.status == (400 if fields["max_tokens"] > 9 else 200)
                    await response.read()
    finally:
        access_log.removeHandler(handler)
        handler.close()
    expected = [["ann", "2", "0", "6", "4", "7"], ["bob", "2", "1", "3", "2", "2"]]
    assert main(["usage", str(log)]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0][1:] == [
        *("key", "requests", "failed", "input_tokens", "cached_tokens", "output_tokens"),
    ]
    assert [row[1:] for row in rows[1:]] == expected
    whole = log.read_text().splitlines()[0]
    assert all(report([whole[:end]]).count("\n") == 1 for end in range(whole.rindex("seconds")))
    start = "2000-01-01 00:00:00,000"
    forged = f"{start} INFO baton.access request key=bob output_tokens=9"
    other = f'{start} WARNING baton.router request resumed request_name="{forged}"\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO("(pid=7) " + log.read_text() + other))
    assert main(["usage"]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    assert main(["usage", str(tmp_path / "absent")]) == 1
