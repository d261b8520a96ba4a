import json
from datetime import UTC, datetime

from benchmarks import report
from benchmarks.report import typical_of
from cluster.bench import facts
from cluster.bench.measure import Result, Run, summarise


def summary(seconds):
    return summarise(
        [Result(sent=0.0, ended=seconds, chunk_times=(0.5, seconds), output_tokens=10)]
    )


def a_report(config=""):
    repeats = (summary(1.0), summary(4.0), summary(2.0))
    run = Run(
        label="4 clients", prompt_tokens=128, output_tokens=64, concurrency=4, repeats=repeats
    )
    return report.Report(
        theme="Serve CPU",
        hardware="Some Xeon (R) @ 2 GHz",
        command="python -m benchmarks.serve",
        server="baton 0.1",
        model="m",
        workload="closed loop",
        note="",
        config=config,
        runs=(run,),
    )


def test_the_row_is_the_repeat_with_the_median_rate():
    assert typical_of(a_report().runs[0]).output_tokens_per_s == 5.0


def test_both_files_are_written_and_never_overwritten(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("a: 1\n")
    now = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
    path = report.write(a_report(str(config)), tmp_path, now)
    assert path.name == "serve-cpu_some-xeon-r-2-ghz_2026-11-27.md"
    page = path.read_text()
    assert "| 4 clients | 128 / 64 | **5.0** (10, 2, 5) |" in page
    assert "note:" not in page
    data = json.loads(path.with_suffix(".json").read_text())
    assert len(data["config_sha256"]) == 12
    assert data["config_sha256"] in page
    assert data["runs"][0]["repeats"][1]["wall_s"] == 4.0
    assert report.write(a_report(), tmp_path, now).name.endswith("_2.md")


def test_the_machine_and_the_commit_are_named():
    assert "cores" in facts.machine()
    assert facts.commit() != ""
